"""Options: one clear error for everything that is unknown, wrong, contradictory or misplaced; the docs show
the table that is parsed.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from broker_core.core.errors import OptionError
from broker_core.engine import Origin
from connector.options import (
    ALL,
    OPTIONS,
    PLAIN,
    READ,
    TABLE,
    absolute_data,
    parse,
    read_options,
    table_options,
    write_options,
)

URL = {"url": "txmq://localhost:5673"}
STREAM_READ = {**URL, "queue": "orders", "appid": "alerts"}
BATCH_READ = {**URL, "queue": "orders"}
STREAM_WRITE = {**URL, "appid": "alerts"}
BASE = {
    "stream read": STREAM_READ,
    "batch read": BATCH_READ,
    "stream write": STREAM_WRITE,
    "batch write": dict(URL),
    "table read": {**URL, "table": "queues"},
}


def refused(raw: dict[str, str], mode: Any) -> str:
    def parsed() -> object:
        if mode in TABLE:
            return table_options(raw)
        return read_options(raw, mode) if mode in READ else write_options(raw, mode)

    with pytest.raises(OptionError) as caught:
        parsed()
    text = str(caught.value)
    assert text.startswith("[TXMQ_OPTION] ")
    assert "\n" not in text
    return text


def test_option_names_are_case_insensitive() -> None:
    options = read_options(
        {"URL": "txmq://h:1", "Queue": "a, b", "APPID": "x", "MaxOffsetsPerTrigger": "5"}, "stream read"
    )
    assert options.queues == ("a", "b")
    assert (options.app_id, options.max_rows) == ("x", 5)


def test_defaults_are_those_of_the_table() -> None:
    read = read_options(STREAM_READ, "stream read")
    assert read.origin == Origin(at="earliest")
    assert (read.max_rows, read.max_bytes, read.min_rows, read.max_delay_s) == (None, None, None, 900.0)
    assert (read.included, read.fail_on_data_loss, read.on_new_checkpoint) == (PLAIN, True, "fail")
    write = write_options(STREAM_WRITE, "stream write")
    assert (write.exchange, write.routing_key, write.on_unroutable, write.on_new_checkpoint) == (
        "",
        "",
        "fail",
        "fail",
    )


def test_an_unknown_option_is_refused_with_the_option_probably_meant() -> None:
    text = refused({**STREAM_READ, "maxoffsetpertrigger": "5"}, "stream read")
    assert "unknown option 'maxoffsetpertrigger' (value '5') for a stream read" in text
    assert "did you mean 'maxOffsetsPerTrigger'?" in text
    assert "did you mean" not in refused({**STREAM_READ, "zzz": "5"}, "stream read")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
@pytest.mark.parametrize("mode", ALL)
def test_no_option_is_silently_ignored(option: Any, mode: Any) -> None:
    if mode not in option.modes:
        assert f"option {option.name!r} (value 'x') is for" in refused(
            {**BASE[mode], option.name.lower(): "x"}, mode
        )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("url", "localhost:5673", "txmq://[user:password@]host:port"),
        ("queue", "a,,b", "a queue, or several separated by commas"),
        ("queue", "a,a", "each queue once"),
        ("appId", " ", "a text that is not empty"),
        ("startingOffsets", "first", "earliest, latest, or JSON"),
        ("startingOffsets", '{"orders": -3}', "earliest, latest, or JSON"),
        ("startingOffsets", '{"orders": true}', "earliest, latest, or JSON"),
        ("startingTimestamp", "yesterday", "milliseconds since the epoch, or ISO 8601"),
        ("maxOffsetsPerTrigger", "0", "a whole number above 0"),
        ("maxOffsetsPerTrigger", "1e6", "a whole number above 0"),
        ("maxBytesPerTrigger", "10 apples", "a number of bytes above 0"),
        ("minPartitions", "-1", "a whole number above 0"),
        ("includeProperties", "yes", "true, false"),
        ("failOnDataLoss", "1", "true, false"),
        ("onNewCheckpoint", "ignore", "fail, resume"),
    ],
)
def test_a_wrong_value_is_refused_with_option_value_and_what_is_allowed(
    name: str, value: str, allowed: str
) -> None:
    raw = {key: old for key, old in STREAM_READ.items() if key != name.lower()}
    text = refused({**raw, name.lower(): value}, "stream read")
    assert f"option {name!r} has the invalid value {value!r}; allowed: {allowed}" in text


@pytest.mark.parametrize(
    ("raw", "mode", "text"),
    [
        (
            {**STREAM_READ, "data": "d"},
            "stream read",
            "options 'url' ('txmq://localhost:5673') and 'data' ('d') exclude each other",
        ),
        (
            {**STREAM_READ, "startingoffsets": "latest", "startingtimestamp": "1"},
            "stream read",
            "options 'startingOffsets' ('latest') and 'startingTimestamp' ('1') exclude each other",
        ),
        (
            {**STREAM_WRITE, "queue": "q", "exchange": "x"},
            "stream write",
            "options 'queue' ('q') and 'exchange' ('x') exclude each other",
        ),
        (
            {**STREAM_WRITE, "queue": "q", "routingkey": "x"},
            "stream write",
            "'queue' ('q') and 'routingKey' ('x') exclude each other",
        ),
        ({**STREAM_WRITE, "queue": "a,b"}, "stream write", "allowed: one queue to write to"),
        (
            {**STREAM_READ, "maxtriggerdelay": "1s"},
            "stream read",
            "has no meaning without 'minOffsetsPerTrigger'",
        ),
        (
            {**STREAM_READ, "minoffsetspertrigger": "9", "maxoffsetspertrigger": "8"},
            "stream read",
            "(9) is above 'maxOffsets",
        ),
        (
            {**STREAM_READ, "startingoffsets": '{"a": 1}'},
            "stream read",
            "'startingOffsets' names a, option 'queue' names orders",
        ),
        (
            {**BATCH_READ, "endingoffsets": '{"a": 1}'},
            "batch read",
            "'endingOffsets' names a, option 'queue' names orders",
        ),
        ({**BATCH_READ, "startingoffsets": "latest"}, "batch read", "'startingOffsets' cannot be latest"),
        ({**BATCH_READ, "endingoffsets": "earliest"}, "batch read", "'endingOffsets' cannot be earliest"),
        ({**URL, "queue": "q"}, "stream read", "option 'appId' is missing"),
        ({**URL, "appid": "x"}, "stream read", "option 'queue' is missing"),
        ({"queue": "q", "appid": "x"}, "stream read", "option 'url' or 'data' is missing"),
        (URL, "stream write", "option 'appId' is missing"),
        ({**BATCH_READ, "path": "x"}, "batch read", ".load() takes no path"),
        ({**URL, "path": "x"}, "batch write", ".save(), .start() and toTable() take no path"),
        ({"data": "txmq://h:1"}, "batch write", "goes into option 'url'"),
    ],
)
def test_contradictions_and_what_is_missing_are_refused(raw: dict[str, str], mode: Any, text: str) -> None:
    assert text in refused(raw, mode)


def test_what_spark_adds_to_the_options_of_a_sink_is_accepted() -> None:
    write_options({**STREAM_WRITE, "checkpointlocation": "cp", "queryname": "q"}, "stream write")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15m", 900.0),
        ("30s", 30.0),
        ("500ms", 0.5),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("5min", 300.0),
        ("250", 0.25),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    raw = {**STREAM_READ, "minoffsetspertrigger": "1", "maxtriggerdelay": text}
    assert read_options(raw, "stream read").max_delay_s == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("2k", 2048), ("10m", 10 << 20), ("1gb", 1 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert read_options({**STREAM_READ, "maxbytespertrigger": text}, "stream read").max_bytes == size


@pytest.mark.parametrize(
    "text", ["1357016400000", "2013-01-01T05:00:00Z", "2013-01-01T05:00:00", "2013-01-01T00:00:00-05:00"]
)
def test_a_starting_timestamp_is_milliseconds_or_iso_8601_and_utc_without_a_zone(text: str) -> None:
    assert read_options({**STREAM_READ, "startingtimestamp": text}, "stream read").origin == Origin(
        timestamp_us=1_357_016_400_000_000
    )


def test_queue_is_short_for_the_default_exchange_and_this_routing_key() -> None:
    write = write_options({**STREAM_WRITE, "queue": "orders"}, "stream write")
    assert (write.exchange, write.routing_key) == ("", "orders")


def test_a_data_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_data({"data": "broker"})["data"] == os.path.join(tmp_path, "broker")
    assert parse({"data": str(tmp_path)}, "batch write")["data"] == str(tmp_path)


KAFKA = {"url": "kafka://one:9092,two:9092"}


def test_settings_of_kafka_are_passed_on_and_never_shown() -> None:
    raw = {**STREAM_READ, **KAFKA, "Kafka.sasl.password": "secret", "kafka.sasl.username": "me"}
    options = read_options(raw, "stream read")
    assert options.address.url == KAFKA["url"]
    assert options.address.settings == {"kafka.sasl.password": "secret", "kafka.sasl.username": "me"}
    assert "secret" not in repr(options) and "sasl" not in repr(options)
    again = pickle.loads(pickle.dumps(options))
    assert again.address.settings == options.address.settings
    writes = write_options({**STREAM_WRITE, **KAFKA, "kafka.acks": "all"}, "stream write")
    assert writes.address.settings == {"kafka.acks": "all"}


@pytest.mark.parametrize("where", [URL, {"data": "broker"}])
def test_settings_of_kafka_are_refused_for_another_broker(where: dict[str, str]) -> None:
    raw = {"queue": "q", **where, "kafka.sasl.password": "secret"}
    text = refused(raw, "batch read")
    assert "option 'kafka.sasl.password' is for connections to Kafka" in text
    assert "secret" not in text


def test_starting_offsets_may_be_given_as_spark_takes_them_for_kafka() -> None:
    raw = {**BATCH_READ, **KAFKA, "startingoffsets": '{"orders": {"0": 23, "1": -2}}'}
    assert read_options(raw, "batch read").origin.offsets == {"orders/0": 23, "orders/1": -2}
    for wrong in ('{"orders": {}}', '{"orders": {"0": {"1": 2}}}', '{"orders": {"0": "5"}}'):
        text = refused({**raw, "startingoffsets": wrong}, "batch read")
        assert "startingOffsets" in text
    other = refused({**raw, "endingoffsets": '{"pay": {"0": 23}}'}, "batch read")
    assert "'endingOffsets' names pay/0, option 'queue' names orders" in other
