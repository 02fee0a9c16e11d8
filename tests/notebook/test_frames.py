"""``txmq.apps`` and ``txmq.queues`` as pandas frames, and what they say without pandas."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import txmq
from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.engine import Limit, Origin
from broker_core.launcher import Broker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data") as found:
        yield found


def test_frames_have_the_columns_and_types_of_the_lists(broker: Broker) -> None:
    for frame in (txmq.queues(data=broker.directory), txmq.apps(data=broker.directory)):
        assert len(frame) == 0
    with broker.channel() as channel:
        for queue in ("in", "idle"):
            channel.queue_declare(queue)
        channel.publish(b"x", routing_key="in")
    broker.engine.claim("app", ["in"], {"in": "start"}, Limit(), Origin(), "fail")
    queues = txmq.queues(broker.url).set_index("name")
    assert queues.loc["in", "messages"] == 1 and queues.loc["in", "oldest_s"] >= 0
    assert queues["oldest_s"].isna().to_dict() == {"idle": True, "in": False}
    apps = txmq.apps(broker.url)
    assert apps.loc[0, "app_id"] == "app" and apps.loc[0, "lag"] == 1 and apps.loc[0, "queues"] == ("in",)
    for empty, full in ((txmq.apps(broker.url).iloc[:0], apps), (queues.iloc[:0], queues)):
        assert list(empty.columns) == list(full.columns)
    assert str(apps["lag_s"].dtype) == str(queues["oldest_s"].dtype) == "float64"
    assert str(apps["lag"].dtype) == "int64"


def test_a_user_sees_what_the_other_listeners_show(broker: Broker) -> None:
    broker.accounts.add_user("plain", passwords.hashed("plain", passwords.Cost(4)), ())
    broker.accounts.set_permissions("plain", ".*", ".*", ".*")
    for look in (txmq.apps, txmq.queues):
        with pytest.raises(errors.AccessRefused, match="needs the tag"):
            look(broker.url, credentials=txmq.Credentials("plain", "plain"))


@pytest.mark.parametrize("name", ["apps", "queues"])
def test_without_pandas_the_error_says_what_to_install(name: str) -> None:
    script = (
        "import sys; sys.modules['pandas'] = None\n"
        "import txmq\n"
        f"try: txmq.{name}('txmq://localhost:1')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert f"txmq.{name} returns a frame of pandas" in done.stdout and "pip install pandas" in done.stdout


def test_an_import_of_txmq_brings_none_of_what_a_notebook_needs() -> None:
    script = (
        "import sys, txmq\n"
        "print([name for name in ('pandas', 'numpy', 'pyarrow', 'rich', 'IPython', 'pyspark', 'txmq.notebook') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
