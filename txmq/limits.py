"""The limits of ``txmq serve``: what users, connections and pipelines may take.

Not here: where they are checked (``server/quotas.py``, ``broker/transaction/transaction.py``,
``micro_batch/branch.py``).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from broker_core.errors import OptionError
from broker_core.message.message import MAX_BODY_BYTES

if TYPE_CHECKING:
    from broker_core.broker.transaction.transaction import Limits
    from broker_core.server.amqp.options import AmqpOptions
    from broker_core.server.quotas import QuotaLimits, UserLimit

LEAST_FRAME, FRAME_MAX, MOST_FRAME = 4096, 131_072, 128 * 1024 * 1024
LEAST_HOURS = 1.0  # times of attempts are as coarse


def arguments(serve: argparse.ArgumentParser) -> None:
    limits = serve.add_argument_group("limits", "each refusal names its option")
    for name, metavar, kind, text in (
        ("transaction-messages", "N", count, "a larger transaction is refused; default 10 million"),
        ("transaction-bytes", "N", count, "a larger transaction is refused; default 8 GiB"),
        ("transaction-time", "SECONDS", above_zero, "a longer one is rolled back; default: never"),
        ("max-message-size", "BYTES", positive, "a larger body is refused; default and at most 128 MiB"),
        ("frame-max", "BYTES", positive, "of AMQP, offered to each connection; default 131072"),
        ("channel-max", "N", positive, "AMQP channels of one connection; default 2047"),
        (
            "connection-bytes",
            "N",
            positive,
            "of messages of one AMQP connection that are not whole; default 256 MiB",
        ),
        ("handshake-timeout", "SECONDS", above_zero, "for TLS, and again until AMQP is open; default 10"),
        ("connections", "N", positive, "AMQP connections; default: half of the files it may open"),
        ("user-connections", "N", positive, "... of one user; default: no limit"),
        (
            "flight-connections",
            "N",
            positive,
            "connections of Spark and BrokerClient; default: an eighth of the files",
        ),
        ("channels", "N", positive, "channels of AMQP, Spark and BrokerClient; default: no limit"),
        ("user-channels", "N", positive, "... of one user; default: no limit"),
        ("calls", "N", positive, "calls of Spark and BrokerClient in progress; default 2000"),
        ("user-calls", "N", positive, "... of one user; default 1000"),
        ("part-bytes", "N", positive, "parts that calls are staging; default 1 GiB"),
        ("user-part-bytes", "N", positive, "... of one user; default 512 MiB"),
        (
            "staged-bytes",
            "N",
            positive,
            "staged, not yet published or applied, of one user; default: no limit",
        ),
        ("user-attempts", "N", positive, "open batches and batch writes of one user; default 10000"),
        ("staged-hours", "HOURS", hours, "an attempt that stages nothing for so long is dropped; default 24"),
    ):
        limits.add_argument(f"--{name}", metavar=metavar, type=kind, help=text)
    limits.add_argument(
        "--unauthenticated-connections",
        metavar="N",
        type=positive,
        default=1000,
        help="AMQP connections that may wait for their login; one more ends the oldest; default %(default)s",
    )


def above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def hours(text: str) -> float:
    value = float(text)
    if not value >= LEAST_HOURS:
        raise argparse.ArgumentTypeError(f"must be at least {LEAST_HOURS:g}")
    return value


def positive(text: str) -> int:
    value = int(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be below 0")
    return value


def transactions(options: argparse.Namespace) -> Limits:
    from broker_core.broker.transaction.transaction import Limits

    given = {
        "messages": options.transaction_messages,
        "size_bytes": options.transaction_bytes,
        "open_s": options.transaction_time,
        "body_bytes": _body(options),
    }
    return Limits(**_given(given))


def amqp(options: argparse.Namespace) -> AmqpOptions:
    """Raises OptionError."""
    from broker_core.server.amqp.options import AmqpOptions

    body, frame = _body(options), options.frame_max
    if frame is not None and not LEAST_FRAME <= frame <= MOST_FRAME:
        raise OptionError(
            f"--frame-max is {frame}", f"give at least {LEAST_FRAME} and at most {MOST_FRAME} bytes"
        )
    if options.channel_max is not None and options.channel_max > 65_535:
        raise OptionError(f"--channel-max is {options.channel_max}", "AMQP has at most 65535")
    held = options.connection_bytes
    least = body + (frame or FRAME_MAX)
    if held is not None and held < least:
        raise OptionError(
            f"--connection-bytes is {held}, which has no room for one message of {body} bytes",
            f"give at least {least}, or a smaller --max-message-size",
        )
    given = {
        "max_unauthenticated": options.unauthenticated_connections,
        "frame_max": frame,
        "channel_max": options.channel_max,
        "handshake_timeout_s": options.handshake_timeout,
        "max_body_bytes": body,
        "max_pending_bytes": held if held is not None else 2 * MAX_BODY_BYTES,
    }
    return AmqpOptions(**_given(given))


def quotas(options: argparse.Namespace) -> QuotaLimits:
    from broker_core.micro_batch.staged_room import StagedLimits
    from broker_core.server.quotas import CALLS, PART_BYTES, UNLIMITED, QuotaLimits, UserLimit

    def most(name: str, default: UserLimit) -> UserLimit:
        total, user = getattr(options, name), getattr(options, f"user_{name}")
        return UserLimit(default.total if total is None else total, default.user if user is None else user)

    idle_s = options.staged_hours * 3600 if options.staged_hours is not None else None
    staged = {"user_bytes": options.staged_bytes, "user_attempts": options.user_attempts, "idle_s": idle_s}
    return QuotaLimits(
        most("connections", UNLIMITED),
        most("channels", UNLIMITED),
        most("calls", CALLS),
        most("part_bytes", PART_BYTES),
        StagedLimits(**_given(staged)),
        options.flight_connections,
    )


def _body(options: argparse.Namespace) -> int:
    """Raises OptionError."""
    size: int | None = options.max_message_size
    if size is not None and size > MAX_BODY_BYTES:
        raise OptionError(f"--max-message-size is {size}", f"give at most {MAX_BODY_BYTES} bytes")
    return MAX_BODY_BYTES if size is None else size


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
