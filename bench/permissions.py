"""amqp_tx_100_permissions, amqp_confirms_permissions: a user who may do a little beside one who may do
everything, on one broker.

Not here: the loads (perf_test.py). Invariant: the two take turns, and who is first alternates, so that a
machine that grows slower favours neither.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import psutil

from bench import perf_test
from bench.amqp import SECONDS, Load, passed, produced
from bench.broker import serving
from bench.report import Figure, against, note
from broker_core.client.accounts import RemoteAccounts
from txmq import BrokerClient, Credentials

REPETITIONS = 8  # two percent are to be seen
PASSWORD = "of-the-bench"
ADMINISTRATOR, LIMITED = "administrator", "limited"
# what PerfTest uses: the queue, and the exchange that it binds it to
CONFIGURE, WRITE, READ = "^(bench|direct)$", "^(bench|direct|amq\\.default)$", "^(bench|direct)$"


def compared(folder: Path, name: str, load: Load) -> list[Figure]:
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
        found: dict[str, list[float]] = {LIMITED: [], ADMINISTRATOR: []}
        costs: dict[str, list[float]] = {LIMITED: [], ADMINISTRATOR: []}
        for number in range(REPETITIONS):
            for user in sorted(found, reverse=number % 2 == 0):
                uri = served.amqp.replace("guest:guest@", f"{user}:{PASSWORD}@")
                before = processor_s(served.pid)
                found[user].append(load(uri))
                costs[user].append((processor_s(served.pid) - before) / (found[user][-1] * SECONDS))
    cost, reference = (statistics.median(costs[user]) * 1e6 for user in (LIMITED, ADMINISTRATOR))
    note(f"{cost:.1f} us of the broker's processor per message; reference {reference:.1f}")
    return [against(name, found[LIMITED], found[ADMINISTRATOR], "msg/s")]


def processor_s(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def amqp_tx_100_permissions(folder: Path) -> list[Figure]:
    return compared(folder, "amqp_tx_100_permissions", produced("-m", "100"))


def amqp_confirms_permissions(folder: Path) -> list[Figure]:
    return compared(folder, "amqp_confirms_permissions", passed("-c", "1000", "-q", "1000"))
