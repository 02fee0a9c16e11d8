"""http_commit_p99: what 200 requests a second at the HTTP listener cost those who commit.

http_commit_p99_aside: what the same requests cost them at the listener of another broker, without other load:
so much is of the machine (cores, caches, sockets). What is above it is of this broker.
Not here: the load of commits (perf_test.py), the broker (broker.py).
Invariant: one broker with its listener open serves the whole figure; the requests are there, elsewhere or
not, in turns.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import perf_test
from bench.broker import serving
from bench.report import Figure, against, note

REPETITIONS = 6
SECONDS, WARM_S = 8, 2
CONNECTIONS, REQUESTS_A_SECOND = 8, 200
PATHS = (
    "/api/overview",
    "/api/queues?page=1&page_size=100",
    "/api/connections",
    "/api/channels",
    "/api/exchanges/%2F",
    "/api/whoami",
    "/api/health/checks/alarms",
    "/metrics",
)


def http_commit_p99(folder: Path) -> list[Figure]:
    perf_test.classpath()
    with (
        serving(folder / "data", "--http", "127.0.0.1:0", amqp=True) as broker,
        serving(folder / "aside", "--http", "127.0.0.1:0") as aside,
    ):
        assert broker.amqp is not None and broker.http is not None and aside.http is not None

        def load() -> float:
            times = perf_test.commits(broker.amqp or "", 32, WARM_S, SECONDS - WARM_S)
            note(f"{times.commits:,} commits, p50 {times.p50_us:,.0f} us, p99 {times.p99_us:,.0f} us")
            return times.p99_us

        load()
        asked = {"nowhere": "", "aside": aside.http, "here": broker.http}
        found: dict[str, list[float]] = {place: [] for place in asked}
        for repetition in range(REPETITIONS):
            places = list(asked)
            for place in places if repetition % 2 else reversed(places):  # what gets slower slows all alike
                with requests(asked[place]):
                    found[place].append(load())
    return [
        against("http_commit_p99", found["here"], found["nowhere"], "us"),
        against("http_commit_p99_aside", found["aside"], found["nowhere"], "us"),
    ]


@contextlib.contextmanager
def requests(url: str) -> Iterator[None]:
    """A process that asks at a steady rate; "": none."""
    if not url:
        yield
        return
    command = [sys.executable, "-m", "bench.http", url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.terminate()
        told = process.communicate()[0].strip()
        note(f"meanwhile {told}")


async def ask(url: str) -> None:
    """Until it is terminated: ``CONNECTIONS`` clients that share the rate."""
    host, port = url.removeprefix("http://").split(":")
    login = base64.b64encode(b"guest:guest").decode()
    asked = 0

    async def client(number: int) -> None:
        nonlocal asked
        reader, writer = await asyncio.open_connection(host, int(port))
        loop = asyncio.get_running_loop()
        at = loop.time() + number / REQUESTS_A_SECOND
        while True:
            path = PATHS[asked % len(PATHS)]
            writer.write(
                f"GET {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Basic {login}\r\n\r\n".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(size)
            asked += 1
            at += CONNECTIONS / REQUESTS_A_SECOND
            await asyncio.sleep(max(at - loop.time(), 0))

    clients = [asyncio.ensure_future(client(number)) for number in range(CONNECTIONS)]
    print("asking", flush=True)
    began = asyncio.get_running_loop().time()
    try:
        await asyncio.gather(*clients)
    finally:
        seconds = asyncio.get_running_loop().time() - began
        print(f"{asked / seconds:.0f} requests a second", flush=True)


def _main() -> None:
    import signal

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(ask(sys.argv[1]))


if __name__ == "__main__":
    _main()
