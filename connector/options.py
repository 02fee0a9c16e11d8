"""The options of ``format("txmq")``: one table to parse, check and document them.

Not here: the effect of an option. A reader or writer gets a :class:`ReadOptions` or :class:`WriteOptions`,
never a raw option.

Invariant: no option is silently ignored. An unknown, wrong or contradictory option raises one OptionError,
which names the option, the value, the allowed values and, for a typing error, the likely option.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from broker_core.admin import Admin
from broker_core.core.address import check_vhost, parse_address, without_login, without_password
from broker_core.core.credentials import Credentials
from broker_core.core.errors import OptionError
from broker_core.engine import EARLIEST, LATEST, Engine, OnNewCheckpoint, Origin
from broker_core.engines import (
    KAFKA,
    SETTING,
    check_credentials,
    check_settings,
    check_vhost_option,
    connect,
    connect_admin,
)
from connector import parsers
from connector.ledger_start import LedgerStart

Mode = Literal["stream read", "batch read", "stream write", "batch write", "table read"]
ALL: tuple[Mode, ...] = ("stream read", "batch read", "stream write", "batch write", "table read")
READ: tuple[Mode, ...] = ("stream read", "batch read")
WRITE: tuple[Mode, ...] = ("stream write", "batch write")
MESSAGES: tuple[Mode, ...] = READ + WRITE
STREAM: tuple[Mode, ...] = ("stream read", "stream write")
TABLE: tuple[Mode, ...] = ("table read",)

# Spark adds these to the options of a sink.
CHECKPOINT = "checkpointlocation"
SPARKS_OWN = frozenset({CHECKPOINT, "queryname"})

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
    Option("url", None, parsers.url, ALL, "a running broker: `txmq://host:5673`, or Kafka: "
                             "`kafka://host:9092,host:9092`", excludes=("data",)),
    Option("data", None, parsers.directory, ALL,
           "the broker of this data directory, started if needed; one of `url`, `data` is required"),
    Option("vhost", None, str, ALL,
           "the virtual host at `data`, default `/`; a `url` has it as its path: `txmq://host:5673/sales`"),
    Option("queue", None, parsers.names, MESSAGES,
           "read: one queue, or several separated by commas; write: default exchange and this routing key",
           required=READ, excludes=("exchange", "routingKey")),
    Option("table", None, parsers.choice("transactions", "ledger", "queues", "apps", "consumers"), TABLE,
           "the state of the broker in place of messages: `transactions`, `ledger`, `queues`, `apps` or "
           "`consumers`"),
    Option("appId", None, parsers.name, STREAM,
           "the stable name of the app: owner of the claim and of the ledger entry", required=STREAM),
    Option("startingOffsets", "earliest", parsers.starting_offsets, READ,
           '`earliest`, `latest` or JSON `{"queue": offset}`; for a new query; skipped messages stay. On '
           'Kafka also `{"ledger": PATH, "batch": N}`: where an app was before it decided batch N',
           excludes=("startingTimestamp",)),
    Option("startingTimestamp", None, parsers.timestamp_us, READ,
           "first message committed at or after it (ms since the epoch, or ISO 8601)"),
    Option("endingOffsets", "latest", parsers.offsets, ("batch read",),
           '`latest` or JSON `{"queue": offset}`, exclusive'),
    Option("maxOffsetsPerTrigger", None, parsers.positive, ("stream read",),
           "maximum messages per micro-batch; a transaction is not split"),
    Option("maxBytesPerTrigger", None, parsers.size_bytes, ("stream read",),
           "maximum bytes per micro-batch (`10m`); a transaction is not split"),
    Option("minOffsetsPerTrigger", None, parsers.positive, ("stream read",),
           "wait for this many messages in all queues together"),
    Option("maxTriggerDelay", "15m", parsers.duration_s, ("stream read",),
           "maximum wait after the commit of the oldest message (`30s`)",
           needs="minOffsetsPerTrigger"),
    Option("minPartitions", None, parsers.positive, READ,
           "minimum tasks per micro-batch; default: one per 1,000 rows, up to the cores of the host or the "
           "partitions"),
    Option("maxRecordsPerPartition", None, parsers.positive, READ, "maximum messages per task"),
    Option("includeProperties", "false", parsers.boolean, READ, "adds the column `properties`"),
    Option("includeTransaction", "false", parsers.boolean, READ,
           "adds the column `transaction`: the number of the commit that published the message"),
    Option("includeKey", "false", parsers.boolean, READ,
           "adds the column `key`: the bytes of Kafka's, null without one; elsewhere the routing key"),
    Option("includeHeaders", "false", parsers.boolean, READ,
           "adds the column `headers`, as Spark's Kafka source has it"),
    Option("failOnDataLoss", "true", parsers.boolean, ("stream read",),
           "fail if messages of a claimed range no longer exist"),
    Option("exchange", "", str, WRITE,
           "the exchange, unless a column gives it; empty: the default exchange"),
    Option("routingKey", "", str, WRITE, "the routing key, unless a column gives it"),
    Option("onUnroutable", "fail", parsers.choice("fail", "drop"), WRITE,
           "a message that reaches no queue: `fail` the transaction, or `drop` it"),
    Option("onNewCheckpoint", "fail", parsers.choice("fail", "resume"), STREAM,
           "another checkpoint owns this `appId`: `fail`, or `resume` where its last decided batch ended"),
    Option("user", None, parsers.name, ALL,
           "the user of the broker at `url`; its password is one of the next two, or `TXMQ_PASSWORD`"),
    Option("password", None, str, ALL, "never shown; see docs/tls.md for secret stores",
           excludes=("passwordFile",)),
    Option("passwordFile", None, parsers.name, ALL, "a file of the driver with the password"),
    Option("token", None, parsers.name, ALL, "a token in place of a user",
           excludes=("user", "password", "passwordFile")),
    Option("tlsCa", None, parsers.name, ALL,
           "`txmqs://`: the authority of the broker's certificate, a PEM file on every host; default: those "
           "of the machine"),
    Option("tlsCert", None, parsers.name, ALL, "a certificate of this client, a PEM file on every host",
           needs="tlsKey"),
    Option("tlsKey", None, parsers.name, ALL, "its key", needs="tlsCert"),
)  # fmt: skip
BY_KEY = {option.name.lower(): option for option in OPTIONS}

_SECRETS = frozenset({"password", "token"})
_LIKE_SECRETS = re.compile("(?i)pass|secret|token|key|pwd|credential")

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
        where = {
            ALL: "all",
            MESSAGES: "reads, writes",
            READ: "reads",
            WRITE: "writes",
            STREAM: "streams",
        }.get(option.modes, ", ".join(option.modes) + "s")
        required = {(): "", READ: "reads", STREAM: "streams"}[option.required]
        absent = f"required ({required})" if required else ""
        default = {None: absent, "": '`""`'}.get(option.default, f"`{option.default}`")
        rows.append(f"| `{option.name}` | {default} | {where} | {option.meaning} |")
    return "\n".join(rows)


def _mask(key: str, value: str) -> str:
    """The value of an option as an error may show it."""
    name = key.lower()
    like = name not in BY_KEY and (
        _LIKE_SECRETS.search(name) or difflib.get_close_matches(name, _SECRETS, n=1, cutoff=0.5)
    )
    return "'***'" if name in _SECRETS or like else repr(without_password(value))


def check_known(raw: Mapping[str, str], modes: tuple[Mode, ...]) -> None:
    """Raises OptionError for the first name that is not an option. Settings of Kafka are checked later."""
    for key, value in raw.items():
        key = key.lower()
        if key in BY_KEY or key in SPARKS_OWN or _is_setting(key):
            continue
        direction = "read" if modes[0] in READ else "write"
        if key in ("path", "paths"):
            raise OptionError(
                f"option {key!r} ({_mask(key, value)}) is not an option of format txmq; "
                f"{_PATH_HINT[direction]}"
            )
        allowed = [option.name for option in OPTIONS if set(modes) & set(option.modes)]
        near = difflib.get_close_matches(key, [name.lower() for name in allowed], n=1, cutoff=0.6)
        hint = f"did you mean {BY_KEY[near[0]].name!r}? " if near else ""
        raise OptionError(
            f"unknown option {key!r} (value {_mask(key, value)}) for a {' or '.join(modes)}; {hint}allowed "
            f"are {', '.join(allowed)}"
        )


def _is_setting(key: str) -> bool:
    return key.lower().startswith(SETTING)


def parse(raw: Mapping[str, str], mode: Mode) -> dict[str, Any]:
    """Option name -> value or default; None for an absent option without default. Raises OptionError."""
    texts = {
        key.lower(): value
        for key, value in raw.items()
        if key.lower() not in SPARKS_OWN and not _is_setting(key)
    }
    check_known(texts, (mode,))
    for key, value in texts.items():
        option = BY_KEY[key]
        if mode not in option.modes:
            raise OptionError(
                f"option {option.name!r} (value {_mask(key, value)}) is for "
                f"{' and '.join(option.modes)}, not for a {mode}; leave it out"
            )
    values: dict[str, object] = {}
    for key, option in BY_KEY.items():
        if key in texts:
            values[option.name] = _parse_one(option, texts)
        elif mode in option.required:
            raise OptionError(
                f"option {option.name!r} is missing; a {mode} of format txmq needs it: {option.meaning}"
            )
        else:
            values[option.name] = None if option.default is None else option.parse(option.default)
    if values["url"] is None and values["data"] is None:
        raise OptionError("option 'url' or 'data' is missing", "set url=txmq://host:port, or data=DIR")
    return values


def _parse_one(option: Option, texts: Mapping[str, str]) -> Any:
    value = texts[option.name.lower()]
    text = _mask(option.name, value)
    for other in option.excludes:
        if other.lower() in texts:
            raise OptionError(
                f"options {option.name!r} ({text}) and {other!r} ({_mask(other, texts[other.lower()])}) "
                "exclude each other; give one of them"
            )
    if option.needs and option.needs.lower() not in texts:
        raise OptionError(
            f"option {option.name!r} (value {text}) has no meaning without {option.needs!r}; give both or "
            "none"
        )
    try:
        return option.parse(value)
    except parsers.InvalidOption as wrong:
        raise OptionError(f"option {option.name!r} has the invalid value {text}; allowed: {wrong}") from None


def absolute_data(raw: MutableMapping[str, str]) -> MutableMapping[str, str]:
    """The options with an absolute ``data``; called in the driver: a task may have another directory."""
    if "data" in raw:
        try:
            raw["data"] = parsers.directory(raw["data"])
        except parsers.InvalidOption:
            pass  # refused later, with the other options
    return raw


# -- what readers and writers get ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """Where the broker is: exactly one of ``url`` and ``data`` is set; ``data`` is absolute, ``url`` without
    a login. ``settings``: of the connections to Kafka; neither they nor ``credentials`` are shown.
    """

    url: str | None
    data: str | None
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    credentials: Credentials = field(default=Credentials(), repr=False)
    vhost: str | None = None  # with ``data``

    def engine(self) -> Engine:
        """The connection of this process, which is opened at the first use.

        A task waits for a broker that starts again as long as its driver does, even in a new worker process.
        """
        from pyspark import TaskContext

        reached = TaskContext.get() is not None
        return connect(
            self.url, self.data, self.settings, self.credentials, vhost=self.vhost, reached=reached
        )

    def admin(self) -> Admin:
        """The operator's port of the same broker."""
        return connect_admin(self.url, self.data, self.settings, self.credentials, vhost=self.vhost)


def _address(raw: Mapping[str, str], values: Mapping[str, Any]) -> AddressOptions:
    """Raises OptionError."""
    settings = {key.lower(): value for key, value in raw.items() if _is_setting(key)}
    check_settings(values["url"], settings)
    names = ("user", "password", "passwordFile", "token", "tlsCa", "tlsCert", "tlsKey")
    credentials = Credentials(*(values[name] or "" for name in names))
    check_credentials(values["url"], credentials)
    check_vhost_option(values["url"], values["vhost"])
    if values["url"] is None or values["url"].lower().startswith(KAFKA):
        if values["vhost"] is not None:
            check_vhost(values["vhost"])
        return AddressOptions(values["url"], values["data"], settings, vhost=values["vhost"])
    # here, in the driver: a task has neither its environment nor its files
    found = parse_address(values["url"], None, credentials, values["vhost"])
    return AddressOptions(without_login(values["url"]), None, settings, found.credentials)


class ExtraColumns(NamedTuple):
    """The columns of a read that are there only if they are asked for."""

    properties: bool = False
    transaction: bool = False
    key: bool = False
    headers: bool = False


PLAIN = ExtraColumns()


@dataclass(frozen=True, slots=True)
class TableOptions:
    address: AddressOptions
    table: str


@dataclass(frozen=True, slots=True)
class ReadOptions:
    address: AddressOptions
    queues: tuple[str, ...]
    app_id: str  # "" for a batch read
    origin: Origin
    ledger_start: LedgerStart | None  # in place of ``origin``
    ending: Origin
    max_rows: int | None
    max_bytes: int | None
    min_rows: int | None
    max_delay_s: float
    min_partitions: int | None
    max_rows_per_partition: int | None
    included: ExtraColumns
    fail_on_data_loss: bool
    on_new_checkpoint: OnNewCheckpoint


@dataclass(frozen=True, slots=True)
class WriteOptions:
    address: AddressOptions
    app_id: str  # "" for a batch write
    exchange: str
    routing_key: str
    on_unroutable: Literal["fail", "drop"]
    on_new_checkpoint: OnNewCheckpoint
    checkpoint: str | None  # of its query


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


def table_options(raw: Mapping[str, str]) -> TableOptions:
    """Raises OptionError."""
    values = parse(raw, "table read")
    return TableOptions(_address(raw, values), values["table"])


def read_options(raw: Mapping[str, str], mode: Literal["stream read", "batch read"]) -> ReadOptions:
    """Raises OptionError."""
    values = parse(raw, mode)
    queues: tuple[str, ...] = values["queue"]
    starting, ending = values["startingOffsets"], values["endingOffsets"]
    ledger_start, origin = None, Origin(timestamp_us=values["startingTimestamp"])
    if isinstance(starting, LedgerStart):
        ledger_start = starting
        if mode == "batch read" or not (values["url"] or "").lower().startswith(KAFKA):
            raise OptionError(
                "option 'startingOffsets' names a batch of a ledger, which is for streams on Kafka: it keeps "
                "what was consumed",
                "give earliest, latest, or offsets",
            )
    elif mode == "batch read":
        if starting == "latest" or (isinstance(starting, dict) and LATEST in starting.values()):
            raise OptionError(
                "option 'startingOffsets' cannot be latest (-1) for a batch read, which would "
                "read nothing; leave it out"
            )
        if ending == "earliest" or (isinstance(ending, dict) and EARLIEST in ending.values()):
            raise OptionError(
                "option 'endingOffsets' cannot be earliest (-2), which would read nothing; leave it out"
            )
    if ledger_start is None and origin.timestamp_us is None:
        origin = _from("startingOffsets", starting, queues)
    least, most = values["minOffsetsPerTrigger"], values["maxOffsetsPerTrigger"]
    if least is not None and most is not None and least > most:
        raise OptionError(
            f"option 'minOffsetsPerTrigger' ({least}) is above 'maxOffsetsPerTrigger' "
            f"({most}); make it smaller"
        )
    return ReadOptions(
        address=_address(raw, values),
        queues=queues,
        app_id=values["appId"] or "",
        origin=origin,
        ledger_start=ledger_start,
        ending=_from("endingOffsets", ending, queues),
        max_rows=most,
        max_bytes=values["maxBytesPerTrigger"],
        min_rows=least,
        max_delay_s=values["maxTriggerDelay"],
        min_partitions=values["minPartitions"],
        max_rows_per_partition=values["maxRecordsPerPartition"],
        included=ExtraColumns(*(values[f"include{name.title()}"] for name in ExtraColumns._fields)),
        fail_on_data_loss=values["failOnDataLoss"],
        on_new_checkpoint=values["onNewCheckpoint"],
    )


def app_options(settings: Mapping[str, str] | None, **options: str | None) -> WriteOptions:
    """The options of an app that writes by a function or a mirror; ``settings``: of the connection to Kafka.
    Raises OptionError.
    """
    raw = {**(settings or {}), **options}
    return write_options({name: value for name, value in raw.items() if value is not None}, "stream write")


def write_options(raw: Mapping[str, str], mode: Literal["stream write", "batch write"]) -> WriteOptions:
    """Raises OptionError."""
    values = parse(raw, mode)
    routing_key = values["routingKey"]
    if values["queue"] is not None:
        if len(values["queue"]) > 1:
            raise OptionError(
                f"option 'queue' has the invalid value {','.join(values['queue'])!r}; allowed: one queue to "
                "write to; "
                "bind several to an exchange and write there"
            )
        routing_key = values["queue"][0]
    return WriteOptions(
        address=_address(raw, values),
        app_id=values["appId"] or "",
        exchange=values["exchange"],
        routing_key=routing_key,
        on_unroutable=values["onUnroutable"],
        on_new_checkpoint=values["onNewCheckpoint"],
        checkpoint=next((value for key, value in raw.items() if key.lower() == CHECKPOINT), None),
    )
