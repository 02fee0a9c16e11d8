"""The options of ``format("txmq")``: one table to parse, check and document them.

Not here: the effect of an option. A reader or writer gets a :class:`ReadOptions` or :class:`WriteOptions`,
never a raw option.

Invariant: no option is silently ignored. An unknown, wrong or contradictory option raises one OptionError,
which names the option, the value, the allowed values and, for a typing error, the likely option.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, TypeVar, cast

from broker_core.engine import EARLIEST, LATEST, Engine, OnNewCheckpoint, Origin
from broker_core.engines import SETTING, check_settings, connect
from broker_core.errors import OptionError

Mode = Literal["stream read", "batch read", "stream write", "batch write"]
ALL: tuple[Mode, ...] = ("stream read", "batch read", "stream write", "batch write")
READ: tuple[Mode, ...] = ("stream read", "batch read")
WRITE: tuple[Mode, ...] = ("stream write", "batch write")
STREAM: tuple[Mode, ...] = ("stream read", "stream write")

# Spark adds these to the options of a sink.
SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})

_URL = re.compile(r"(txmqs?|kafka)://[^/\s]+/?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+)\s*(us|ms|s|m|min|h|d)?")
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)b?")
_UNIT_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class _Wrong(ValueError):
    """A value is not allowed; the text lists the allowed ones."""


# -- parsers: text -> value, or _Wrong(what is allowed) ------------------------------------------------------


def _text(value: str) -> str:
    return value


def _name(value: str) -> str:
    if not value.strip():
        raise _Wrong("a text that is not empty")
    return value.strip()


def _url(value: str) -> str:
    if not _URL.fullmatch(value.strip()):
        raise _Wrong("txmq://[user:password@]host:port, or kafka://host:port,host:port")
    return value.strip()


def _directory(value: str) -> str:
    if not value.strip():
        raise _Wrong("the path of a data directory")
    if "://" in value:
        raise _Wrong(
            "the path of a data directory on this machine; the address of a broker goes into option 'url'"
        )
    return os.path.abspath(os.path.expanduser(value.strip()))


def _names(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        raise _Wrong("a queue, or several separated by commas")
    if len(set(names)) != len(names):
        raise _Wrong("each queue once")
    return names


def _boolean(value: str) -> bool:
    if value.strip().lower() not in ("true", "false"):
        raise _Wrong("true, false")
    return value.strip().lower() == "true"


def _positive(value: str) -> int:
    if not re.fullmatch(r"\d{1,18}", value.strip()) or int(value) == 0:
        raise _Wrong("a whole number above 0")
    return int(value)


def _size_bytes(value: str) -> int:
    found = _SIZE.fullmatch(value.strip().lower())
    size_bytes = int(found[1]) * _UNIT_BYTES[found[2]] if found else 0
    if not 0 < size_bytes < 1 << 63:
        raise _Wrong("a number of bytes above 0, such as 1048576, 512k, 10m, 1g")
    return size_bytes


def _duration_s(value: str) -> float:
    found = _DURATION.fullmatch(value.strip().lower())
    if not found or int(found[1]) == 0:
        raise _Wrong("a duration above 0, such as 500ms, 30s, 15m, 2h; without a unit, milliseconds")
    return int(found[1]) * _UNIT_S[found[2] or "ms"]


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.strip().lower() not in allowed:
            raise _Wrong(", ".join(allowed))
        return value.strip().lower()

    return parse


def _json_offsets(value: str) -> dict[str, int] | None:
    try:
        offsets = json.loads(value)
    except ValueError:
        return None
    if not isinstance(offsets, dict) or not offsets:
        return None
    offsets = _by_log(offsets)
    if not all(
        isinstance(offset, int) and not isinstance(offset, bool) and offset >= EARLIEST
        for offset in offsets.values()
    ):
        return None
    return offsets


def _by_log(offsets: Mapping[str, Any]) -> dict[str, Any]:
    """``{"orders": {"3": 12}}``, as Spark's Kafka source takes it, is ``{"orders/3": 12}``."""
    logs: dict[str, Any] = {}
    for name, found in offsets.items():
        if isinstance(found, dict) and found:
            logs |= {f"{name}/{partition}": offset for partition, offset in found.items()}
        else:
            logs[name] = found
    return logs


def _offsets(value: str) -> str | dict[str, int]:
    text = value.strip()
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    offsets = _json_offsets(text)
    if offsets is None:
        raise _Wrong(
            'earliest, latest, or JSON from queue to offset such as {"orders": 1200} (-2 earliest, -1 latest)'
        )
    return offsets


def _timestamp_us(value: str) -> int:
    """Milliseconds since the epoch, or ISO 8601 (UTC without a zone), as microseconds since the epoch."""
    text = value.strip()
    if re.fullmatch(r"\d{1,15}", text):
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    except ValueError:
        raise _Wrong("milliseconds since the epoch, or ISO 8601 such as 2013-01-01T05:00:00Z") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return int(moment.timestamp() * 1_000_000)


# -- the table -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One row: ``default`` (text or None), its ``modes``, its ``required`` modes, options it ``excludes``."""

    name: str
    default: str | None
    parse: Callable[[str], Any]
    modes: tuple[Mode, ...]
    meaning: str
    required: tuple[Mode, ...] = ()
    excludes: tuple[str, ...] = ()
    needs: str = ""


OPTIONS: tuple[Option, ...] = (
    Option("url", None, _url, ALL, "a running broker: `txmq://host:5673`, or Kafka: "
                             "`kafka://host:9092,host:9092`", excludes=("data",)),
    Option("data", None, _directory, ALL,
           "the broker of this data directory, started if needed; one of `url`, `data` is required"),
    Option("queue", None, _names, ALL, "read: one queue, or several separated by commas; write: default "
                                       "exchange and this routing key",
           required=READ, excludes=("exchange", "routingKey")),
    Option("appId", None, _name, STREAM, "the stable name of the pipeline: owner of the claim and of the "
                                         "ledger entry", required=STREAM),
    Option("startingOffsets", "earliest", _offsets, READ,
           '`earliest`, `latest` or JSON `{"queue": offset}`; for a new query; skipped messages stay',
           excludes=("startingTimestamp",)),
    Option("startingTimestamp", None, _timestamp_us, READ, "first message committed at or after it (ms since "
                                                           "the epoch, or ISO 8601)"),
    Option("endingOffsets", "latest", _offsets, ("batch read",), '`latest` or JSON `{"queue": offset}`, '
                                                                 'exclusive'),
    Option("maxOffsetsPerTrigger", None, _positive, ("stream read",),
           "maximum messages per micro-batch; a transaction is not split"),
    Option("maxBytesPerTrigger", None, _size_bytes, ("stream read",),
           "maximum bytes per micro-batch (`10m`); a transaction is not split"),
    Option("minOffsetsPerTrigger", None, _positive, ("stream read",),
           "wait for this many messages in all queues together"),
    Option("maxTriggerDelay", "15m", _duration_s, ("stream read",),
           "maximum wait after the commit of the oldest message (`30s`)",
           needs="minOffsetsPerTrigger"),
    Option("minPartitions", None, _positive, READ,
           "minimum tasks per micro-batch; default: one per 1,000 rows, up to the cores of the host or the "
           "partitions"),
    Option("maxRecordsPerPartition", None, _positive, READ, "maximum messages per task"),
    Option("includeProperties", "false", _boolean, READ, "adds the column `properties`"),
    Option("failOnDataLoss", "true", _boolean, ("stream read",),
           "fail if messages of a claimed range no longer exist"),
    Option("exchange", "", _text, WRITE,
           "the exchange, unless a column gives it; empty: the default exchange"),
    Option("routingKey", "", _text, WRITE, "the routing key, unless a column gives it"),
    Option("onUnroutable", "fail", _choice("fail", "drop"), WRITE, "a message that reaches no queue: `fail` "
                                                                   "the transaction, or `drop` it"),
    Option("onNewCheckpoint", "fail", _choice("fail", "resume"), STREAM,
           "another checkpoint owns this `appId`: `fail`, or `resume` where its last decided batch ended"),
)  # fmt: skip
BY_KEY = {option.name.lower(): option for option in OPTIONS}

_PATH_HINT = {
    "read": ".load() takes no path: name the queue by .option('queue', ...) and the broker by .option('url', "
    "...) or .option('data', ...)",
    "write": ".save(), .start() and toTable() take no path or table: name the target by .option('queue', "
    "...) or .option('exchange', ...)",
}


def table() -> str:
    """The options as the rows of a Markdown table."""
    rows = ["| option | default | for | meaning |", "|---|---|---|---|"]
    for option in OPTIONS:
        where = {ALL: "all", READ: "reads", WRITE: "writes", STREAM: "streams"}.get(
            option.modes, ", ".join(option.modes) + "s"
        )
        required = {(): "", READ: "reads", STREAM: "streams"}[option.required]
        default = (
            f"`{option.default}`"
            if option.default
            else '`""`'
            if option.default == ""
            else f"required ({required})" * bool(required)
        )
        rows.append(f"| `{option.name}` | {default} | {where} | {option.meaning} |")
    return "\n".join(rows)


def check_known(raw: Mapping[str, str], modes: tuple[Mode, ...]) -> None:
    """Raises OptionError for the first name that is not an option. Settings of Kafka are checked later."""
    for key, value in raw.items():
        if key.lower() not in BY_KEY and key.lower() not in SPARKS_OWN and not _is_setting(key):
            _refuse_unknown(key.lower(), value, modes)


def _refuse_unknown(key: str, value: str, modes: tuple[Mode, ...]) -> None:
    direction = "read" if modes[0] in READ else "write"
    if key in ("path", "paths"):
        raise OptionError(
            f"option {key!r} ({value!r}) is not an option of format txmq; {_PATH_HINT[direction]}"
        )
    allowed = [option.name for option in OPTIONS if set(modes) & set(option.modes)]
    near = difflib.get_close_matches(key, [name.lower() for name in allowed], n=1, cutoff=0.6)
    meant = f"did you mean {BY_KEY[near[0]].name!r}? " if near else ""
    raise OptionError(
        f"unknown option {key!r} (value {value!r}) for a {' or '.join(modes)}; {meant}allowed "
        f"are {', '.join(allowed)}"
    )


def _is_setting(key: str) -> bool:
    return key.lower().startswith(SETTING)


def parse(raw: Mapping[str, str], mode: Mode) -> dict[str, Any]:
    """Option name -> value or default; None for an absent option without default. Raises OptionError."""
    given = {
        key.lower(): value
        for key, value in raw.items()
        if key.lower() not in SPARKS_OWN and not _is_setting(key)
    }
    check_known(given, (mode,))
    for key, value in given.items():
        option = BY_KEY[key]
        if mode not in option.modes:
            raise OptionError(
                f"option {option.name!r} (value {value!r}) is for {' and '.join(option.modes)}, not for a "
                f"{mode}; leave it out"
            )
    values: dict[str, Any] = {}
    for key, option in BY_KEY.items():
        if key in given:
            values[option.name] = _parse_one(option, given)
        elif mode in option.required:
            raise OptionError(
                f"option {option.name!r} is missing; a {mode} of format txmq needs it: {option.meaning}"
            )
        else:
            values[option.name] = (
                option.parse(option.default) if option.default is not None and mode in option.modes else None
            )
    if values["url"] is None and values["data"] is None:
        raise OptionError("option 'url' or 'data' is missing", "set url=txmq://host:port, or data=DIR")
    return values


def _parse_one(option: Option, given: Mapping[str, str]) -> Any:
    value = given[option.name.lower()]
    for other in option.excludes:
        if other.lower() in given:
            raise OptionError(
                f"options {option.name!r} ({value!r}) and {other!r} ({given[other.lower()]!r}) exclude each "
                "other; give one of them"
            )
    if option.needs and option.needs.lower() not in given:
        raise OptionError(
            f"option {option.name!r} (value {value!r}) has no meaning without "
            f"{option.needs!r}; give both or none"
        )
    try:
        return option.parse(value)
    except _Wrong as wrong:
        raise OptionError(f"option {option.name!r} has the wrong value {value!r}; allowed: {wrong}") from None


def absolute_data(raw: MutableMapping[str, str]) -> MutableMapping[str, str]:
    """The options with an absolute ``data``; called in the driver: a task may have another directory."""
    if "data" in raw:
        try:
            raw["data"] = _directory(raw["data"])
        except _Wrong:
            pass  # refused later, with the other options
    return raw


# -- what readers and writers get ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Where the broker is: exactly one of ``url`` and ``data`` is set; ``data`` is absolute. ``settings``: of
    the connections to Kafka, never shown.
    """

    url: str | None
    data: str | None
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    def engine(self) -> Engine:
        """The connection of this process, which is opened at the first use.

        A task waits for a broker that starts again as long as its driver does, also in a new worker process.
        """
        from pyspark import TaskContext

        reached = TaskContext.get() is not None
        return connect(url=self.url, data=self.data, settings=self.settings, reached=reached)


def _address(raw: Mapping[str, str], values: Mapping[str, Any]) -> Address:
    """Raises OptionError."""
    settings = {key.lower(): value for key, value in raw.items() if _is_setting(key)}
    check_settings(values["url"], settings)
    return Address(values["url"], values["data"], settings)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    address: Address
    queues: tuple[str, ...]
    app_id: str  # "" for a batch read
    origin: Origin
    ending: Origin
    max_rows: int | None
    max_bytes: int | None
    min_rows: int | None
    max_delay_s: float
    min_partitions: int | None
    max_rows_per_partition: int | None
    include_properties: bool
    fail_on_data_loss: bool
    on_new_checkpoint: OnNewCheckpoint


@dataclass(frozen=True, slots=True)
class WriteOptions:
    address: Address
    app_id: str  # "" for a batch write
    exchange: str
    routing_key: str
    on_unroutable: Literal["fail", "drop"]
    on_new_checkpoint: OnNewCheckpoint


_T = TypeVar("_T")


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _origin(values: Mapping[str, Any], queues: tuple[str, ...]) -> Origin:
    if values["startingTimestamp"] is not None:
        return Origin(timestamp_us=values["startingTimestamp"])
    return _from("startingOffsets", values["startingOffsets"], queues)


def _from(name: str, value: str | dict[str, int], queues: tuple[str, ...]) -> Origin:
    if isinstance(value, str):
        return Origin(at=cast(Literal["earliest", "latest"], value))
    _check_names(name, value, queues)
    return Origin("latest" if name == "endingOffsets" else "earliest", offsets=value)


def _check_names(name: str, offsets: Mapping[str, int], queues: tuple[str, ...]) -> None:
    """Raises OptionError for a name of no queue, and for a queue that is not named. Whether ``orders/3`` is a
    log of ``orders``, the engine checks when the query starts.
    """
    of = {queue: [key for key in offsets if key == queue or key.startswith(queue + "/")] for queue in queues}
    if not all(of.values()) or offsets.keys() - {key for keys in of.values() for key in keys}:
        raise OptionError(
            f"option {name!r} names {', '.join(sorted(offsets))}, option 'queue' names "
            f"{', '.join(sorted(queues))}; "
            "give an offset for every queue and for no other"
        )


def read_options(raw: Mapping[str, str], mode: Literal["stream read", "batch read"]) -> ReadOptions:
    """Raises OptionError."""
    values = parse(raw, mode)
    queues: tuple[str, ...] = values["queue"]
    starting, ending = values["startingOffsets"], _or(values["endingOffsets"], "latest")
    if mode == "batch read":
        if starting == "latest" or (isinstance(starting, dict) and LATEST in starting.values()):
            raise OptionError(
                "option 'startingOffsets' cannot be latest (-1) for a batch read, which would "
                "read nothing; leave it out"
            )
        if ending == "earliest" or (isinstance(ending, dict) and EARLIEST in ending.values()):
            raise OptionError(
                "option 'endingOffsets' cannot be earliest (-2), which would read nothing; leave it out"
            )
    least, most = values["minOffsetsPerTrigger"], values["maxOffsetsPerTrigger"]
    if least is not None and most is not None and least > most:
        raise OptionError(
            f"option 'minOffsetsPerTrigger' ({least}) is above 'maxOffsetsPerTrigger' "
            f"({most}); make it smaller"
        )
    return ReadOptions(
        address=_address(raw, values),
        queues=queues,
        app_id=_or(values["appId"], ""),
        origin=_origin(values, queues),
        ending=_from("endingOffsets", ending, queues),
        max_rows=most,
        max_bytes=values["maxBytesPerTrigger"],
        min_rows=least,
        max_delay_s=_or(values["maxTriggerDelay"], 0.0),
        min_partitions=values["minPartitions"],
        max_rows_per_partition=values["maxRecordsPerPartition"],
        include_properties=values["includeProperties"],
        fail_on_data_loss=_or(values["failOnDataLoss"], True),
        on_new_checkpoint=_or(values["onNewCheckpoint"], "fail"),
    )


def write_options(raw: Mapping[str, str], mode: Literal["stream write", "batch write"]) -> WriteOptions:
    """Raises OptionError."""
    values = parse(raw, mode)
    exchange, routing_key = _or(values["exchange"], ""), _or(values["routingKey"], "")
    if values["queue"] is not None:
        if len(values["queue"]) > 1:
            raise OptionError(
                f"option 'queue' has the wrong value {','.join(values['queue'])!r}; allowed: one queue to "
                "write to; "
                "bind several to an exchange and write there"
            )
        routing_key = values["queue"][0]
    return WriteOptions(
        address=_address(raw, values),
        app_id=_or(values["appId"], ""),
        exchange=exchange,
        routing_key=routing_key,
        on_unroutable=values["onUnroutable"],
        on_new_checkpoint=_or(values["onNewCheckpoint"], "fail"),
    )
