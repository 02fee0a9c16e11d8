"""The engine on Kafka needs nothing of the embedded broker: it is imported, tested and used where
``broker_core.broker`` cannot be imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# what is only for the embedded broker; a name of Kafka's engine that needs one fails by its import
BLOCKED = ("broker", "amqp", "client", "flight", "launcher", "node", "server", "store")
WHERE = """
import importlib, pkgutil, sys
import pytest

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:1] == ["broker_core"] and name.split(".")[1:2] in {blocked}:
            raise ImportError(name + " is blocked")
        return None

sys.meta_path.insert(0, Blocked())
try:
    import broker_core.broker
except ImportError as error:
    assert "is blocked" in str(error)
else:
    sys.exit("the broker was imported")
import broker_core
for package in {free}:
    for module in pkgutil.walk_packages([f"broker_core/{{package}}"], f"broker_core.{{package}}."):
        importlib.import_module(module.name)
options = ["--noconftest", "-p", "tests.kafka.conftest", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
sys.exit(pytest.main(["-q", *options, *sys.argv[1:]]))
"""
# a whole micro-batch, one through exchanges and bindings, the operator's port
USED = (
    "tests/kafka/test_engine.py::test_every_row_goes_through_once",
    "tests/kafka/sink/test_published.py",
    "tests/kafka/test_admin.py",
)


@pytest.mark.slow
def test_kafka_is_used_where_the_broker_cannot_be_imported() -> None:
    code = WHERE.format(blocked=[[name] for name in BLOCKED], free=["kafka", "micro_batch", "routing"])
    ended = subprocess.run(
        [sys.executable, "-c", code, *USED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout and " failed" not in ended.stdout
