"""amqp_tx_100_permissions, amqp_confirms_permissions: the processor time of the broker per message, of a user
who may do a little beside one who may do everything.

Processor time, because permissions cost nothing else, and on a shared machine rates swing by more than what
is to be seen. Not here: the loads (perf_test.py). Invariant: the two take turns on one broker, and who is
first alternates.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from bench import perf_test
from bench.amqp import QUEUE
from bench.broker import serving
from bench.report import Figure, against
from broker_core.client.accounts import RemoteAccounts
from txmq import BrokerClient, Credentials

REPETITIONS = 12  # two percent are to be seen
MESSAGES = 100_000
PASSWORD = "of-the-bench"
ADMINISTRATOR, LIMITED = "administrator", "limited"
# what PerfTest uses: the queue, and the exchange that it binds it to
CONFIGURE, WRITE, READ = "^(bench|direct)$", "^(bench|direct|amq\\.default)$", "^(bench|direct)$"


def compared(folder: Path, name: str, *options: str) -> list[Figure]:
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
        costs_ns: dict[str, list[float]] = {LIMITED: [], ADMINISTRATOR: []}
        for number in range(-1, REPETITIONS):  # the first is not counted: the broker warms up
            for user in sorted(costs_ns, reverse=number % 2 == 0):
                uri = served.amqp.replace("guest:guest@", f"{user}:{PASSWORD}@")
                before = processor_s(served.pid)
                perf_test.perf_test_count(uri, QUEUE, MESSAGES, *options)
                if number >= 0:
                    costs_ns[user].append((processor_s(served.pid) - before) / MESSAGES * 1e9)
                perf_test.delete(uri, QUEUE)
    return [against(name, costs_ns[LIMITED], costs_ns[ADMINISTRATOR], "ns")]


def processor_s(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def amqp_tx_100_permissions(folder: Path) -> list[Figure]:
    return compared(folder, "amqp_tx_100_permissions", "-y", "0", "-m", "100")


def amqp_confirms_permissions(folder: Path) -> list[Figure]:
    received = ("-D", str(MESSAGES), "-q", "1000")
    return compared(folder, "amqp_confirms_permissions", "-c", "1000", *received)
