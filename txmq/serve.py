"""``txmq serve``: the broker of a data directory, with its listeners.

Not here: the broker, which is imported when the command runs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from broker_core.address import DEFAULT_AMQP, DEFAULT_AMQPS, DEFAULT_PORT, NO_AMQP
from broker_core.errors import OptionError
from txmq import limits
from txmq.limits import above_zero, count

if TYPE_CHECKING:
    from broker_core.server.doors import Doors


def arguments(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--data", metavar="DIR", required=True, help="created if missing")
    serve.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=f"127.0.0.1:{DEFAULT_PORT}",
        help="port 0 takes a free one; default %(default)s",
    )
    serve.add_argument(
        "--amqp",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help=f"address for AMQP 0-9-1 clients; may be repeated; '{NO_AMQP}' for none; default {DEFAULT_AMQP}",
    )
    serve.add_argument(
        "--http",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="address for HTTP: RabbitMQ's management API, metrics; HTTPS with --tls-cert; may be repeated; "
        "default: none",
    )
    serve.add_argument("--open-metrics", action="store_true", help="/metrics of --http needs no login")
    serve.add_argument(
        "--users", metavar="FILE", help="NAME:PASSWORD or NAME:HASH lines, not readable for others"
    )
    serve.add_argument(
        "--trace", action="store_true", help="copy every message to the exchange amq.rabbitmq.trace"
    )
    serve.add_argument(
        "--publish-rate",
        metavar="N",
        type=above_zero,
        help="messages a second that one AMQP connection may publish",
    )
    serve.add_argument("--outcomes", metavar="N", type=count, help="outcomes to keep; default 100 thousand")
    serve.add_argument("--outcome-hours", metavar="HOURS", type=above_zero, help="for how long; default 24")
    serve.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="of the log, which goes to standard error; default %(default)s",
    )
    serve.add_argument("--idle-timeout", metavar="SECONDS", type=above_zero, help="end after this idle time")
    limits.arguments(serve)
    _add_tls(serve)


def _add_tls(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--tls-cert", metavar="FILE", help="PEM: the certificate, then those that signed it")
    serve.add_argument("--tls-key", metavar="FILE", help="PEM: its key, without a password")
    serve.add_argument("--tls-ca", metavar="FILE", help="PEM: the authorities of clients' certificates")
    serve.add_argument(
        "--tls-verify-peer", action="store_true", help="refuse clients without a certificate of --tls-ca"
    )
    serve.add_argument(
        "--tls-login-from",
        choices=("distinguished_name", "common_name"),
        default="distinguished_name",
        help="what of a certificate is the user, for AMQP's EXTERNAL; default %(default)s",
    )
    serve.add_argument(
        "--amqps",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help=f"address for AMQP with TLS; may be repeated; '{NO_AMQP}' for none; default {DEFAULT_AMQPS}",
    )
    serve.add_argument(
        "--allow-plaintext", action="store_true", help="also listen without TLS where other hosts reach it"
    )
    serve.add_argument(
        "--token-only",
        action="store_true",
        help="serve only clients that can read the data directory (data=DIR)",
    )


def serve(options: argparse.Namespace) -> int:
    from broker_core.broker.transaction.outcomes import Kept
    from broker_core.launcher import serve as serve_until_signal
    from broker_core.server.access.users_file import read_users
    from broker_core.server.amqp.handlers.handler import Handler
    from broker_core.server.amqp.handlers.rate_limit import PublishRateLimit
    from broker_core.server.amqp.handlers.trace import Tracer

    handlers: list[Handler] = []
    if options.trace:
        handlers.append(Tracer())
    if options.publish_rate is not None:
        handlers.append(PublishRateLimit(options.publish_rate))
    hours = options.outcome_hours
    outcomes = {"count": options.outcomes, "age_s": hours * 3600 if hours is not None else None}
    return serve_until_signal(
        options.data,
        listen=options.listen,
        amqp=() if NO_AMQP in options.amqp else options.amqp or (DEFAULT_AMQP,),
        amqp_options=limits.amqp(options),
        users=read_users(options.users) if options.users else None,
        handlers=handlers,
        outcomes=Kept(**{name: value for name, value in outcomes.items() if value is not None}),
        limits=limits.transactions(options),
        doors=_doors(options),
        quotas=limits.quotas(options),
        idle_timeout_s=options.idle_timeout,
        log_format=options.log_format,
    )


def _doors(options: argparse.Namespace) -> Doors:
    """Raises OptionError."""
    from broker_core.server.doors import Doors
    from broker_core.server.tls import TlsOptions

    tls = None
    if bool(options.tls_cert) != bool(options.tls_key):
        raise OptionError("one of --tls-cert and --tls-key is missing", "give both, or none of them")
    if options.tls_cert:
        tls = TlsOptions(
            options.tls_cert,
            options.tls_key,
            options.tls_ca or "",
            options.tls_verify_peer,
            options.tls_login_from,
        )
    elif options.tls_ca or options.tls_verify_peer or set(options.amqps) - {NO_AMQP}:
        raise OptionError(
            "--tls-ca, --tls-verify-peer or --amqps is given without a certificate",
            "give --tls-cert and --tls-key too",
        )
    amqps = () if tls is None or NO_AMQP in options.amqps else options.amqps or (DEFAULT_AMQPS,)
    return Doors(tls, amqps, options.token_only, options.allow_plaintext, options.http, options.open_metrics)
