"""``txmq queue skip-damaged``: removes damaged messages from a queue of a running broker.

Not here: how (``broker_core/store/salvage/live.py``), and a broker that does not start (``txmq broker
salvage``).
"""

from __future__ import annotations

import dataclasses

from broker_core.admin import SkippedDamage
from broker_core.client.admin import skip_damaged
from txmq.address import BROKER, client_at, queue_names
from txmq.command.declare import YES, Options, argument, command
from txmq.output import confirm, done

QUEUE = argument("QUEUE", shell_complete=queue_names)


@command("queue skip-damaged", "remove damaged messages from a queue", *BROKER, QUEUE, YES)
def _skip_damaged(options: Options) -> int:
    client = client_at(options)
    found = skip_damaged(client, options.queue, check=True)
    if not found.blocks:
        text = f"nothing of queue {options.queue} is damaged"
        return done(options, text, **dataclasses.asdict(found))
    confirm(options, f"skip-damaged takes out {_text(found)}")
    skipped = skip_damaged(client, options.queue)
    return done(options, f"skipped {_text(skipped)}", **dataclasses.asdict(skipped))


def _text(found: SkippedDamage) -> str:
    if not found.messages:
        return f"no message: {found.blocks} damaged blocks are intact in memory, and are written again"
    parts: dict[tuple[str, str], list[str]] = {}
    for each in found.messages:
        span = f"{each.start}" if each.end - each.start == 1 else f"{each.start} to {each.end - 1}"
        parts.setdefault((each.queue, each.vhost), []).append(span)
    count = sum(each.end - each.start for each in found.messages)
    queues = (
        f"{', '.join(spans)} of queue '{name}' in vhost '{host}'" for (name, host), spans in parts.items()
    )
    return f"{count} damaged messages: offsets {'; '.join(queues)}"
