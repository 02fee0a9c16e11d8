"""What crosses Flight: rows, errors, memory; and how a broker is found, started and ended."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pyarrow as pa
import pytest

from bench.broker import serve_command
from broker_core.arrow.parts import stream_of
from broker_core.client.broker import BrokerClient, connect
from broker_core.core import endpoint, errors
from broker_core.engine import START, BranchHeader, Engine, Limit, Origin, ReadTicket, StagedBranch
from broker_core.launcher import Broker
from broker_core.node.engine import EmbeddedEngine
from broker_core.server.listener_options import ListenerOptions
from tests.progress import wait_until
from tests.server.conftest import MicroBatch, Served, bodies, fill

MEGABYTE = 1024 * 1024


def _ticket(client: BrokerClient, *queues: str) -> ReadTicket:
    start = dict.fromkeys(queues, START)
    end = client.claim("app", list(start), start, Limit(), Origin(), "fail")
    ranges = client.resolve("app", start, end)
    return ReadTicket(
        "app", "query", 0, ranges, tuple((log, first, last) for log, (first, last) in ranges.items())
    )


def _publish_header(queue: str, token: str = "token") -> BranchHeader:
    return BranchHeader(token, f"branch of {token}", "publish", {"exchange": "", "routing_key": queue})


# -- rows ----------------------------------------------------------------------------------------------------


def _ipc(batch: pa.RecordBatch) -> bytes:
    return bytes(stream_of([batch], batch.schema))


def test_mapped_read_gives_the_same_bytes_as_a_read_over_flight(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client, BrokerClient(served.url, map_files=False) as remote:
        with client.channel() as channel:
            channel.exchange_declare("events", "topic")
            for queue, key in (("all", "#"), ("some", "a.*")):
                channel.queue_declare(queue)
                channel.queue_bind(queue, "events", key)
        keys = ["a.b", "b.c", "a.c"]
        batch = pa.record_batch(
            {
                "body": [str(row) * 7 for row in range(90_000)],
                "routing_key": [keys[row % 3] for row in range(90_000)],
            }
        )
        header = BranchHeader("token", "branch", "publish", {"exchange": "events", "routing_key": ""})
        client.commit_branches("token", [client.stage(header, [batch])])
        fill(client, "all", 3_000, size=50)
        with client.channel() as channel:  # some are settled before the claim, some may have been sent
            for _ in range(5):
                delivery = channel.get("all")
                assert delivery is not None
                if delivery.tag % 2:
                    channel.ack(delivery.tag)
        ticket = _ticket(client, "all", "some")
        mapped, over_flight = list(client.read(ticket)), list(remote.read(ticket))
        assert sum(batch.num_rows for batch in mapped) == 90_000 + 3_000 - 3 + 60_000
        assert [_ipc(batch) for batch in mapped] == [_ipc(batch) for batch in over_flight]
        assert sum(batch.column("redelivered").to_pylist().count(True) for batch in mapped) == 2


def test_read_goes_on_over_flight_when_a_segment_file_is_gone(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client, BrokerClient(served.url, map_files=False) as remote:
        fill(client, "q", 0)
        batch = pa.record_batch({"body": [b"x" * 100] * 70_000})
        client.commit_branches("token", [client.stage(_publish_header("q"), [batch])])
        ticket = _ticket(client, "q")
        expected = list(remote.read(ticket))  # and now the broker has the batches in its memory
        rows = client.read(ticket)
        moved = served.directory / "segments.moved"
        (served.directory / "segments").rename(moved)
        assert [_ipc(batch) for batch in rows] == [_ipc(batch) for batch in expected]
        moved.rename(served.directory / "segments")


def test_flipped_byte_in_a_mapped_segment_is_the_brokers_error_with_file_and_batch(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        fill(client, "q", 0)
        batch = pa.record_batch({"body": [b"x" * 100] * 70_000})
        client.commit_branches("token", [client.stage(_publish_header("q"), [batch])])
        served.kill()
        (segment,) = (served.directory / "segments").glob("*.arrow")
        with segment.open("r+b") as file:
            file.seek(3_000_000)
            byte = file.read(1)
            file.seek(3_000_000)
            file.write(bytes([byte[0] ^ 1]))
        served.start()
        with pytest.raises(errors.CorruptSegment, match=segment.name):
            list(client.read(_ticket(client, "q")))


@pytest.mark.parametrize("by_files", [False, True])
def test_broker_memory_stays_flat_while_1_500_000_messages_are_staged(served: Served, by_files: bool) -> None:
    served.start()
    process = psutil.Process(served.pid)
    sizes: list[int] = []
    with BrokerClient(served.url, map_files=by_files) as client:
        fill(client, "q", 0)
        batch = pa.record_batch({"body": [b"x" * 100] * 10_000})

        def rows() -> Iterator[pa.RecordBatch]:
            for _ in range(150):
                sizes.append(process.memory_info().rss)
                yield batch

        staged = client.stage(_publish_header("q"), rows())
        assert staged.rows == 1_500_000
        settled = sizes[len(sizes) // 3]  # buffers of the first parts are there
        assert max(sizes) - settled < 60 * MEGABYTE, "the 100 MB still to come must not stay in memory"
        assert client.commit_branches("token", [staged]) == 1_500_000
        assert client.queues()[0].messages == 1_500_000


@pytest.mark.parametrize(
    "fault", ["store.adopt.open@1=raise", "store.adopt.open@2=raise", "no files without a name"]
)
def test_rows_go_over_flight_from_where_on_their_files_cannot_be_had(
    served: Served, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker_core.client.stage.FILE_BYTES", 2 * 1024 * 1024)
    if fault.startswith("no"):
        monkeypatch.setattr(os, "O_TMPFILE", 0)
    served.start(fault if "=" in fault else "")
    batches = [
        pa.record_batch({"body": [str(first + row).encode() for row in range(50_000)]})
        for first in range(0, 300_000, 50_000)
    ]
    with BrokerClient(served.url) as client:
        fill(client, "q", 0)
        staged = client.stage(_publish_header("q"), batches)
        assert client.commit_branches("token", [staged]) == staged.rows == 300_000
        assert bodies(client, "q") == [str(row).encode() for row in range(300_000)]


def test_branches_to_apply_come_back_with_their_own_schema(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        opened = client.open_batch("app", "query", 0, "fail")
        batch = pa.record_batch({"origin": ["JFK", None], "delay": [1.5, 2.5]})
        header = BranchHeader(
            opened.token, "branch", "append", {"table": "lake/flights", "options": {"mergeSchema": "true"}}
        )
        staged = client.stage(header, [batch])
        client.commit_batch("app", "query", 0, opened.token, [staged])
        (entry,) = client.unapplied("app")
        assert entry.to_apply[0].target == {"table": "lake/flights", "options": {"mergeSchema": "true"}}
        assert pa.Table.from_batches(
            client.read_branches(entry.to_apply[0].branches)
        ) == pa.Table.from_batches([batch])


def test_wait_ends_when_a_message_comes_and_not_before(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        fill(client, "q", 0)
        assert not client.wait(["q"], {"q": 0}, 0.2)
        process = multiprocessing.get_context("spawn").Process(target=_publish_one, args=(served.url,))
        process.start()
        assert client.wait(["q"], {"q": 0}, 30.0)
        process.join()


def _publish_one(url: str) -> None:
    with BrokerClient(url) as client:
        fill(client, "q", 1)


_FORKS = """
import os, sys
from broker_core.client.broker import BrokerClient, connect
from broker_core.core.errors import LocalProtocolError

def in_child(call):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call()
            code = 0
        except LocalProtocolError as error:
            code = 7 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

client = connect(url=sys.argv[1])
print(in_child(client.queues), in_child(client.queues), len(client.queues()), in_child(client.queues))
"""


def test_client_made_before_a_fork_works_in_the_workers_and_one_used_before_says_that_it_cannot(
    served: Served,
) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        fill(client, "q", 3)
    forks = subprocess.run(
        [sys.executable, "-c", _FORKS, served.url], capture_output=True, text=True, timeout=600, check=True
    )
    assert forks.stdout.split() == ["0", "0", "1", "7"]


def test_client_is_pickled_by_its_address_and_made_once_in_a_process(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client, pickle.loads(pickle.dumps(client)) as copy:
        assert copy.queues() == client.queues()
    assert connect(url=served.url) is connect(url=served.url)


def test_client_has_every_method_of_the_port() -> None:
    missing = [name for name in vars(Engine) if not name.startswith("_") and not hasattr(BrokerClient, name)]
    assert missing == []


# -- errors --------------------------------------------------------------------------------------------------


def test_error_crosses_as_the_same_class_with_the_same_text(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        with pytest.raises(errors.QueueNotFound) as caught:
            client.logs(["nowhere"])
        assert "'nowhere'" in caught.value.message
        assert "gRPC" not in str(caught.value)
        assert "Detail" not in str(caught.value)
        with pytest.raises(errors.UnknownTransaction):
            client.commit("no-such-xid")
        with pytest.raises(errors.MissingBranch):
            client.commit_branches("other", [StagedBranch("absent", 0, 0, 5, 7)])
        with client.channel() as channel, pytest.raises(errors.PreconditionFailed):
            channel.tx_commit()
        with client.channel() as channel, pytest.raises(errors.ExchangeNotFound):
            channel.publish(b"", exchange="nowhere")


@pytest.mark.parametrize("piece", ["x", "名", "%", "\0", "\ud800"])
@pytest.mark.parametrize("count", [1_000, 3_000, 10_000, 1_000_000])
def test_the_class_of_an_error_arrives_however_long_its_text_is(
    piece: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an action and in a stream, with its first words and its advice."""

    def refused(*_: object, **__: object) -> None:
        raise errors.CheckpointMismatch(f"the first words {piece * count}", "the advice")

    monkeypatch.setattr(EmbeddedEngine, "logs", refused)
    monkeypatch.setattr(EmbeddedEngine, "plan_browse", refused)
    with Broker.open(tmp_path / "data") as broker, BrokerClient(broker.url) as client:
        for call in (lambda: client.logs(["q"]), lambda: list(client.browse([("q", 0, 1)]))):
            with pytest.raises(errors.CheckpointMismatch) as caught:
                call()
            assert caught.value.message.startswith("the first words")
            assert caught.value.message.endswith(": the advice")


def test_publish_that_fails_in_a_transaction_closes_the_channel_and_nothing_is_committed(
    served: Served,
) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        fill(client, "q", 0)
        with client.channel() as channel:
            channel.tx_select()
            channel.publish(b"before", routing_key="q")
            channel.publish(b"fails", exchange="nowhere")
            channel.publish(b"after", routing_key="q")
            with pytest.raises(errors.ExchangeNotFound):
                channel.tx_commit()
            with pytest.raises(errors.TransactionState, match="closed"):
                channel.tx_commit()
        assert bodies(client, "q") == []


def test_null_body_is_refused_and_names_the_row(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        batches = [pa.record_batch({"body": ["a", "b"]}), pa.record_batch({"body": ["c", None]})]
        with pytest.raises(errors.OptionError, match="row 3 has no body"):
            client.stage(_publish_header("q"), batches)


def test_url_where_nothing_listens_says_so_within_seconds_and_names_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets this port
        port = taken.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(
            errors.ConnectionFailed, match=f"nothing listens at txmq://127.0.0.1:{port}: start a broker there"
        ):
            BrokerClient(f"txmq://127.0.0.1:{port}").apps()
        assert time.monotonic() - started < 10


@pytest.mark.parametrize("listener", ["amqp", "http"])
def test_url_of_another_port_of_the_broker_says_which_port_to_give(tmp_path: Path, listener: str) -> None:
    listeners = ListenerOptions(http=["127.0.0.1:0"])
    with Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"], listeners=listeners) as broker:
        (other,) = broker.amqp_urls if listener == "amqp" else broker.http_urls
        url = f"txmq://127.0.0.1:{urlsplit(other).port}"
        with pytest.raises(
            errors.ConnectionFailed, match="give the port of --listen, not of --amqp or --http"
        ):
            BrokerClient(url, connect_s=1).apps()
        assert BrokerClient(broker.url).apps() == []


def test_restarted_broker_that_never_comes_is_an_error_after_reconnect_s(served: Served) -> None:
    served.start()
    with BrokerClient(served.url, reconnect_s=0.5) as client:
        assert client.apps() == []
        served.kill()
        with pytest.raises(errors.ConnectionFailed, match="has not answered for"):
            client.apps()


def test_a_broker_that_took_the_place_of_another_at_its_address_is_known_as_itself(tmp_path: Path) -> None:
    """gRPC connects again by itself: neither the identity nor the files of the first one are those of the second."""
    with Broker.open(tmp_path / "first") as first:
        client = BrokerClient(first.url)
        assert client.identity() == first.engine.identity()
        port = first.port
    with client, Broker.open(tmp_path / "second", port=port) as second:
        assert client.apps() == []
        assert client.identity() == second.engine.identity()
        fill(client, "q", 0)
        batch = pa.record_batch(
            {"body": [b"x" * 300_000] * 20}
        )  # it goes as a file, into the second directory
        client.commit_branches("t", [client.stage(_publish_header("q", "t"), [batch])])


# -- data directories ----------------------------------------------------------------------------------------


def test_data_directory_in_use_is_refused_and_names_the_owner(served: Served) -> None:
    served.start()
    with pytest.raises(errors.DataDirectoryLocked, match=f"in use by process {served.pid}"):
        Broker.open(served.directory)
    command = serve_command(served.directory, "--amqp", "none")
    second = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert second.returncode == 1
    assert second.stdout == ""
    assert second.stderr.startswith("txmq: [TXMQ_DATA_DIRECTORY_LOCKED]")


def _pid_at(directory: Path) -> int:
    found = endpoint.read_endpoint(str(directory))
    assert found is not None
    return found.pid


def _pid_of_broker(directory: str, ready: object, answers: object) -> None:
    ready.wait()  # type: ignore[attr-defined]
    with BrokerClient(data=directory) as client:
        client.apps()
        answers.put(_pid_at(Path(directory)))  # type: ignore[attr-defined]


def test_four_processes_that_need_the_broker_at_once_start_one(embedded: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, answers = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_pid_of_broker, args=(str(embedded), ready, answers)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    pids = {answers.get(timeout=600) for _ in processes}
    for process in processes:
        process.join()
    assert len(pids) == 1
    assert (embedded / endpoint.LOG).read_text().count("ready txmq://") == 1


def test_broker_opened_in_a_process_is_found_by_its_directory(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker, BrokerClient(data=tmp_path / "data") as client:
        fill(client, "q", 2)
        assert [queue.messages for queue in broker.queues()] == [2]
    assert endpoint.read_endpoint(str(tmp_path / "data")) is None


def test_idle_broker_ends_and_is_started_again_with_all_that_was_committed(served: Served) -> None:
    served.start("", "--idle-timeout", "1")
    with BrokerClient(data=served.directory) as client:
        fill(client, "q", 3)
        first = _pid_at(served.directory)
        assert served.wait() == 0
        assert not (served.directory / endpoint.ENDPOINT).exists()
        try:
            assert len(bodies(client, "q")) == 3
            assert _pid_at(served.directory) != first
        finally:
            os.kill(_pid_at(served.directory), 15)
            wait_until(lambda: not (served.directory / endpoint.ENDPOINT).exists())


def test_waiting_client_keeps_the_broker_from_being_idle(served: Served) -> None:
    served.start("", "--idle-timeout", "1")
    with BrokerClient(served.url) as client:
        fill(client, "q", 0)
        assert not client.wait(["q"], {"q": 0}, 3.0)
        assert [queue.name for queue in client.queues()] == ["q"]


def test_sigterm_ends_the_broker_cleanly(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        fill(client, "q", 3)
        with client.channel() as channel:
            assert channel.get("q") is not None
            assert served.terminate() == 0
            served.start()
        assert len(bodies(client, "q")) == 3


def test_broker_that_fails_to_start_is_an_error_with_its_own_words(tmp_path: Path) -> None:
    directory = tmp_path / "foreign"
    directory.mkdir()
    (directory / "holiday.jpg").write_bytes(b"")
    with pytest.raises(errors.DataDirectoryInvalid, match=r"holiday\.jpg"):
        BrokerClient(data=directory).apps()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.DataDirectoryInvalid, match="file"):
        BrokerClient(data=tmp_path / "file").apps()


def test_old_endpoint_file_whose_port_another_broker_has_is_not_believed(
    served: Served, embedded: Path
) -> None:
    served.start()
    embedded.mkdir()
    endpoint.write_endpoint(
        endpoint.new_endpoint(str(embedded)),
        endpoint.Endpoint("127.0.0.1", served.port, served.pid, "another id"),
    )
    with BrokerClient(data=embedded) as client, BrokerClient(served.url) as other:
        fill(client, "mine", 1)
        assert other.queues() == []


def test_second_batch_over_the_client_continues_the_first(served: Served) -> None:
    served.start()
    with BrokerClient(served.url) as client:
        fill(client, "in", 10)
        fill(client, "out", 0)
        end = MicroBatch(client, "in", "out").run()
        fill(client, "in", 5)
        MicroBatch(client, "in", "out", batch_id=1).run(end)
        assert len(bodies(client, "out")) == 15
        assert client.last_entry("app").sequence == 2  # type: ignore[union-attr]
