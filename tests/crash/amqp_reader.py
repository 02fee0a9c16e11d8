"""A reader that polls counts and contents of two queues while somebody commits large transactions to both.

Run as ``python amqp_reader.py URL FIRST SECOND LARGE``; it ends when its input ends and prints JSON: how
often it polled, how many messages it took from SECOND, and the part of a commit that it saw, "" where it saw
none. Bodies are numbers from 0 on, in order.
"""

from __future__ import annotations

import json
import select
import sys

from tests.amqp_peer import Peer, peer

GETS = 20


def poll(client: Peer, first: str, second: str, large: int, fetched: int) -> tuple[int, str]:
    """How many were taken, and what was seen that must not be seen."""
    one, two = client.count(1, first), client.count(1, second)
    if one % large or (two + fetched) % large:
        return 0, f"counts {one} and {two} after {fetched} taken"
    if two + fetched < one:
        return (
            0,
            f"{one} messages in the first queue, {two + fetched} in the second, which was looked at later",
        )
    for number in range(fetched, fetched + GETS):
        found = client.get(1, second)
        if found is None:
            return number - fetched, f"empty after {number}" if number % large else ""
        if found[1] != b"%d" % number:
            return number - fetched, f"{found[1]!r} where {number} is due"
        if (found[0].message_count + number + 1) % large:
            return number - fetched, f"get-ok says {found[0].message_count} are left after {number + 1}"
    return GETS, ""


def main(url: str, first: str, second: str, large: str) -> None:
    polls = fetched = 0
    part = ""
    with peer(url, 1) as client:
        print("ready", flush=True)
        while not part and not select.select([sys.stdin], [], [], 0)[0]:
            taken, part = poll(client, first, second, int(large), fetched)
            fetched += taken
            polls += 1
        client.end()
    print(json.dumps({"polls": polls, "fetched": fetched, "part": part}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
