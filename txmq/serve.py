"""``txmq serve``: the broker of a data directory, with its listeners.

Not here: its options (``serve_options.py``), and the broker, which is imported when the command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker_core.core.address import DEFAULT_AMQP, DEFAULT_AMQPS, NO_AMQP, parse_listen
from broker_core.message.message import MAX_BODY_BYTES
from txmq.command.declare import Options, command
from txmq.command.values import Misuse
from txmq.serve_options import serve_options, with_given

if TYPE_CHECKING:
    from broker_core.server.options import ServeOptions
    from broker_core.server.tls import TlsOptions

LEAST_FRAME, FRAME_MAX, MOST_FRAME = 4096, 131_072, 128 * 1024 * 1024


@command("serve", "run the broker of a data directory until SIGTERM", *serve_options(), json=False)
def serve(args: Options) -> int:
    from broker_core.launcher import serve as serve_until_signal

    return serve_until_signal(
        args.data, options_of(args), idle_timeout_s=args.idle_timeout, log_format=args.log_format
    )


def options_of(args: Options) -> ServeOptions:
    """Raises OptionError."""
    from broker_core.server.access.users_file import read_users
    from broker_core.server.amqp.handlers.load import load
    from broker_core.server.listener_options import ListenerOptions
    from broker_core.server.options import ServeOptions

    _check_sizes(args)
    host, port = parse_listen(args.listen)
    users = read_users(args.users) if args.users else None
    tls = _tls(args)
    amqps = () if tls is None or NO_AMQP in args.amqps else args.amqps or (DEFAULT_AMQPS,)
    amqp = () if NO_AMQP in args.amqp else args.amqp or (DEFAULT_AMQP,)
    handlers = load(args.handler, args.handler_option)
    if handlers and not (amqp or amqps):
        raise Misuse("--handler needs an AMQP listener, and there is none", f"leave out --amqp {NO_AMQP}")
    listeners = ListenerOptions(tls, amqps)
    options = ServeOptions(host, port, amqp, handlers=handlers, users=users, listeners=listeners)
    return with_given(options, args)


def _check_sizes(args: Options) -> None:
    """Raises OptionError."""
    body, frame, buffer = args.max_message_size, args.frame_max, args.connection_bytes
    if body is not None and body > MAX_BODY_BYTES:
        raise Misuse(f"--max-message-size is {body}", f"give at most {MAX_BODY_BYTES} bytes")
    if frame is not None and not LEAST_FRAME <= frame <= MOST_FRAME:
        raise Misuse(f"--frame-max is {frame}", f"give at least {LEAST_FRAME} and at most {MOST_FRAME} bytes")
    if args.channel_max is not None and args.channel_max > 65_535:
        raise Misuse(f"--channel-max is {args.channel_max}", "AMQP has at most 65535")
    largest = body or MAX_BODY_BYTES
    least = largest + (frame or FRAME_MAX)
    if buffer is not None and buffer < least:
        raise Misuse(
            f"--connection-bytes is {buffer}, which has no room for one message of {largest} bytes",
            f"give at least {least}, or a smaller --max-message-size",
        )


def _tls(args: Options) -> TlsOptions | None:
    """Raises OptionError."""
    from broker_core.server.tls import TlsOptions

    if bool(args.tls_cert) != bool(args.tls_key):
        raise Misuse("one of --tls-cert and --tls-key is missing", "give both, or none of them")
    if args.tls_cert:
        return TlsOptions(args.tls_cert, args.tls_key)
    if args.tls_ca or args.tls_verify_peer or set(args.amqps) - {NO_AMQP}:
        raise Misuse(
            "--tls-ca, --tls-verify-peer or --amqps is given without a certificate",
            "give --tls-cert and --tls-key too",
        )
    return None
