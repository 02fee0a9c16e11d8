"""The options of ``txmq serve``: one table, of which the arguments, their page and the broker's options are
made.

Not here: what an option does (the parts of ``broker_core/server/options.py``), and what several say together
(``serve.py``).
Invariant: the default that a text names is that of the field (``tests/cli/test_serve_options.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from broker_core.core.address import DEFAULT_AMQP, DEFAULT_AMQPS, DEFAULT_PORT, NO_AMQP
from txmq.command.declare import CommandOption, Options, option
from txmq.command.values import above_zero, count, part, positive, seconds_of_hours, staged_seconds

if TYPE_CHECKING:
    from broker_core.server.options import ServeOptions


More = Mapping[str, Any]  # for click


class ServeOption(NamedTuple):
    """``value``: its name in the help, "" of a switch. ``sets``: paths of the fields of ServeOptions that it
    sets; none for one that ``serve.py`` reads. ``more``: for click.
    """

    flag: str
    value: str
    parse: Callable[[str], object] | click.Choice[str]
    sets: str
    text: str
    more: More = {}


_MANY: More = {"multiple": True}
_NEEDED: More = {"required": True}
_LISTEN: More = {"default": f"127.0.0.1:{DEFAULT_PORT}"}
_TEXT: More = {"default": "text"}

GENERAL = (
    ServeOption("data", "DIR", str, "", "created if missing", _NEEDED),
    ServeOption(
        "listen", "HOST:PORT", str, "",
        f"port 0 takes a free one; default 127.0.0.1:{DEFAULT_PORT}", _LISTEN,
    ),
    ServeOption(
        "amqp", "HOST:PORT", str, "",
        f"address for AMQP 0-9-1 clients; may be repeated; '{NO_AMQP}' for none; default "
        f"{DEFAULT_AMQP}", _MANY,
    ),
    ServeOption(
        "handler", "HANDLER", str, "",
        "MODULE:CLASS, or an installed one; it sees and changes AMQP commands; may be repeated", _MANY,
    ),
    ServeOption(
        "handler-option", "KEY=VALUE", str, "",
        "for the constructors of handlers; HANDLER.KEY=VALUE for one of them; may be repeated", _MANY,
    ),
    ServeOption(
        "http", "HOST:PORT", str, "listeners.http",
        "address for HTTP: RabbitMQ's management API, metrics; HTTPS with --tls-cert; may be repeated; "
        "default: none", _MANY,
    ),
    ServeOption("open-metrics", "", bool, "listeners.open_metrics", "/metrics of --http needs no login"),
    ServeOption("users", "FILE", str, "", "NAME:PASSWORD or NAME:HASH lines, not readable for others"),
    ServeOption("outcomes", "N", count, "outcomes.count", "outcomes to remember; default 100 thousand"),
    ServeOption("outcome-hours", "HOURS", seconds_of_hours, "outcomes.age_s", "maximum age; default 24"),
    ServeOption(
        "history-bytes", "N", count, "history.size_bytes",
        "size of the history of commits (`txmq history show`); 0: none; default 16 MiB",
    ),
    ServeOption("history-hours", "HOURS", seconds_of_hours, "history.age_s", "maximum age; default 24"),
    ServeOption(
        "log-format", "LOG_FORMAT", click.Choice(("text", "json")), "",
        "format of the log, which goes to standard error; default text", _TEXT,
    ),
    ServeOption("strict", "", bool, "strict", "refuse arguments of AMQP that have no effect"),
    ServeOption("idle-timeout", "SECONDS", above_zero, "", "end after this idle time"),
)  # fmt: skip
LIMITS = (
    ServeOption(
        "transaction-messages", "N", count, "limits.messages",
        "a larger transaction is refused; default 10 million",
    ),
    ServeOption(
        "transaction-bytes", "N", count, "limits.size_bytes",
        "a larger transaction is refused; default 8 GiB",
    ),
    ServeOption(
        "transaction-time", "SECONDS", above_zero, "limits.open_s",
        "a transaction that is open for longer is rolled back; default: never",
    ),
    ServeOption(
        "max-message-size", "BYTES", positive, "limits.body_bytes amqp_options.max_body_bytes",
        "a larger body is refused; default and at most 128 MiB",
    ),
    ServeOption(
        "frame-max", "BYTES", positive, "amqp_options.frame_max",
        "frame size that is offered to each AMQP connection; default 131072",
    ),
    ServeOption(
        "channel-max", "N", positive, "amqp_options.channel_max",
        "AMQP channels of one connection; default 2047",
    ),
    ServeOption(
        "connection-bytes", "N", positive, "amqp_options.max_pending_bytes",
        "incomplete messages of one AMQP connection; default 256 MiB",
    ),
    ServeOption(
        "handshake-timeout", "SECONDS", above_zero, "amqp_options.handshake_timeout_s",
        "time for TLS, and again until AMQP is open; default 10",
    ),
    ServeOption(
        "connections", "N", positive, "quotas.connections.total",
        "AMQP connections; default: half of the files that the process may open",
    ),
    ServeOption(
        "user-connections", "N", positive, "quotas.connections.user",
        "AMQP connections of one user; default: its share, --user-share",
    ),
    ServeOption(
        "flight-connections", "N", positive, "quotas.flight_connections",
        "connections of Spark and BrokerClient; default: an eighth of these files",
    ),
    ServeOption(
        "channels", "N", positive, "quotas.channels.total",
        "channels of AMQP, Spark and BrokerClient; default 100000",
    ),
    ServeOption(
        "user-channels", "N", positive, "quotas.channels.user",
        "channels of one user; default: its share, --user-share",
    ),
    ServeOption(
        "calls", "N", positive, "quotas.calls.total",
        "calls of Spark and BrokerClient in progress; default 2000",
    ),
    ServeOption("user-calls", "N", positive, "quotas.calls.user", "calls of one user; default 1000"),
    ServeOption(
        "part-bytes", "N", positive, "quotas.part_bytes.total",
        "rows that calls are staging; default 1 GiB",
    ),
    ServeOption(
        "user-part-bytes", "N", positive, "quotas.part_bytes.user",
        "rows that calls of one user are staging; default 512 MiB",
    ),
    ServeOption(
        "staged-bytes", "N", positive, "quotas.staged.user_bytes",
        "staged rows of one user that are not published or applied; default: no limit",
    ),
    ServeOption(
        "staged-batches", "N", positive, "quotas.staged.user_attempts",
        "staged batches and batch writes of one user; default 10000",
    ),
    ServeOption(
        "staged-hours", "HOURS", staged_seconds, "quotas.staged.idle_s",
        "a staged batch without new rows for this time is dropped; default 24",
    ),
    ServeOption(
        "user-share", "PART", part, "quotas.share",
        "share of a common limit for a user who is not an administrator; 1: all; default 0.1",
    ),
    ServeOption(
        "unauthenticated-connections", "N", positive, "amqp_options.max_unauthenticated",
        "AMQP connections that may wait for their login; one more ends the oldest; default 1000",
    ),
)  # fmt: skip
TLS = (
    ServeOption("tls-cert", "FILE", str, "", "PEM: the certificate, then those that signed it"),
    ServeOption("tls-key", "FILE", str, "", "PEM: its key, without a password"),
    ServeOption("tls-ca", "FILE", str, "listeners.tls.ca", "PEM: the authorities of clients' certificates"),
    ServeOption(
        "tls-verify-peer", "", bool, "listeners.tls.verify_peer",
        "refuse clients without a certificate of --tls-ca",
    ),
    ServeOption(
        "tls-login-from", "TLS_LOGIN_FROM", click.Choice(("distinguished_name", "common_name")),
        "listeners.tls.login_from",
        "which name of a certificate is the user, for AMQP's EXTERNAL; default distinguished_name",
    ),
    ServeOption(
        "amqps", "HOST:PORT", str, "",
        f"address for AMQP with TLS; may be repeated; '{NO_AMQP}' for none; default {DEFAULT_AMQPS}", _MANY,
    ),
    ServeOption(
        "allow-plaintext", "", bool, "listeners.allow_plaintext",
        "also listen without TLS where other hosts reach it",
    ),
    ServeOption(
        "token-only", "", bool, "listeners.token_only",
        "serve only clients that can read the data directory (data=DIR)",
    ),
)  # fmt: skip


def serve_options() -> list[CommandOption]:
    """For the command."""
    return [
        option(
            f"--{each.flag}", each.value, each.text, **{"type": each.parse} if each.value else {}, **each.more
        )
        for each in (*GENERAL, *LIMITS, *TLS)
    ]


def with_given(options: ServeOptions, args: Options) -> ServeOptions:
    """Returns the options with those of the command line. Raises OptionError."""
    for each in (*GENERAL, *LIMITS, *TLS):
        value = getattr(args, each.flag.replace("-", "_"))
        if value is not None and value is not False and value != []:
            for path in each.sets.split():
                options = _with(options, path.split("."), value)
    return options


def _with(owner: Any, path: list[str], value: object) -> Any:
    """Returns a copy of a record with another value of a field; nothing is within a field that is None."""
    name, *rest = path
    within = getattr(owner, name)
    if rest and within is None:
        return owner
    changed = {name: _with(within, rest, value) if rest else value}
    if dataclasses.is_dataclass(owner):
        return dataclasses.replace(owner, **changed)  # type: ignore[type-var]
    return owner._replace(**changed)
