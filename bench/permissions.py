"""amqp_tx_100_permissions, amqp_confirms_permissions: the processor time of the broker per message, of a user
who may do a little beside one who may do everything. amqp_confirms_dedup: of a queue that drops duplicates
beside one that does not.

Processor time, because permissions cost nothing else. On a shared machine it swings too, so the two take very
many short turns on one broker, and the ratio is the median of those of neighbours.
Not here: the load (AmqpLoad.java).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from bench import perf_test
from bench.broker import serving
from bench.report import Figure, note
from broker_core.client.accounts import RemoteAccounts
from txmq import BrokerClient, Credentials

PAIRS, WARM = 80, 4
MESSAGES = 10_000  # of a turn
PASSWORD = "of-the-bench"
ADMINISTRATOR, LIMITED = "administrator", "limited"
# what the load uses: the queue, and the exchange that it binds it to
CONFIGURE, WRITE, READ = "^(bench|direct)$", "^(bench|direct)$", "^(bench|direct)$"


def compared(folder: Path, name: str, acknowledged: str) -> list[Figure]:
    perf_test.classpath()
    data, users = folder / "txmq", folder / "users"
    users.write_text(f"{ADMINISTRATOR}:{PASSWORD}\n")
    users.chmod(0o600)
    with serving(data, "--users", str(users), amqp=True) as served:
        login = Credentials(user=ADMINISTRATOR, password=PASSWORD)
        with BrokerClient(served.url, credentials=login) as client:
            accounts = RemoteAccounts(client)
            accounts.add_user(LIMITED, PASSWORD)
            accounts.set_permissions(LIMITED, CONFIGURE, WRITE, READ)
        assert served.amqp is not None
        uris = [
            served.amqp.replace("guest:guest@", f"{user}:{PASSWORD}@") for user in (LIMITED, ADMINISTRATOR)
        ]
        return in_turns(name, uris, acknowledged, served.pid)


def in_turns(name: str, uris: Sequence[str], acknowledged: str, pid: int, pairs: int = PAIRS) -> list[Figure]:
    """What the broker spends for a message of the first URI, beside one of the second."""
    costs_ns: list[list[float]] = [[], []]
    with perf_test.turns(uris, acknowledged, MESSAGES) as turn:
        for number in range(-WARM, pairs):
            for side in (0, 1) if number % 2 else (1, 0):
                before = processor_ns(pid)
                turn(side)
                if number >= 0:
                    costs_ns[side].append((processor_ns(pid) - before) / MESSAGES)
    ratios = sorted(cost / reference for cost, reference in zip(*costs_ns, strict=True))
    quarter = pairs // 4
    note(f"{name}: ratios of {pairs} pairs, quartiles {ratios[quarter]:.3f} to {ratios[-quarter]:.3f}")
    value, reference = map(statistics.median, costs_ns)
    return [Figure(name, round(value), "ns", round(reference), round(statistics.median(ratios), 3))]


def processor_ns(pid: int) -> int:
    """What the threads of a process have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def amqp_tx_100_permissions(folder: Path) -> list[Figure]:
    return compared(folder, "amqp_tx_100_permissions", "tx")


def amqp_confirms_permissions(folder: Path) -> list[Figure]:
    return compared(folder, "amqp_confirms_permissions", "confirms")


def amqp_confirms_dedup(folder: Path) -> list[Figure]:
    """The same of a queue that drops duplicates, beside one that does not: messages with an id each."""
    perf_test.classpath()
    with serving(folder / "txmq", amqp=True) as served:
        assert served.amqp is not None
        return in_turns("amqp_confirms_dedup", [served.amqp] * 2, "ids", served.pid)
