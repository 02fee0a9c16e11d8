"""``txmq http``: the page, the API and the metrics of a cluster of Kafka.

Not here: the door (``broker_core/server/http/elsewhere``), which is imported when the command runs.
"""

from __future__ import annotations

import os
from contextlib import closing

import click

from broker_core.address import parse_listen
from broker_core.engines import connect, connect_admin, is_kafka
from broker_core.errors import OptionError
from txmq.address import settings_of
from txmq.command.declare import Options, command, option

DEFAULT_HTTP = "127.0.0.1:15672"
ANSWER_MS = "5000"  # how long a page waits for the cluster
_ANSWER = "kafka.default.api.timeout.ms"


@command(
    "http",
    "serve the page, the API and metrics of a cluster of Kafka until SIGTERM",
    option("--url", "URL", "kafka://host:9092", required=True, envvar="TXMQ_URL"),
    option("--settings", "FILE", "lines NAME=VALUE for Kafka: kafka.sasl..."),
    option("--http", "HOST:PORT", f"may be repeated; default {DEFAULT_HTTP}", multiple=True),
    option("--users", "FILE", "NAME:PASSWORD or NAME:HASH lines, not readable for others"),
    option("--tls-cert", "FILE", "PEM: the door speaks HTTPS"),
    option("--tls-key", "FILE", "PEM: its key"),
    option("--allow-plaintext", text="also listen without TLS where other hosts reach it"),
    option("--open-metrics", text="/metrics needs no login"),
    option("--audit", "DIR", "write audit.log there: logins, and what was refused; default: nowhere"),
    option("--log-format", "LOG_FORMAT", "text or json", type=click.Choice(("text", "json")), default="text"),
)
def _http(options: Options) -> int:
    if not is_kafka(options.url):
        raise OptionError(
            "txmq http shows a cluster of Kafka, and --url is not one of kafka://",
            "a broker of txmq has this door itself: txmq serve --http",
        )
    try:
        from broker_core.server.access.users_file import read_users
        from broker_core.server.doors import Doors
        from broker_core.server.http.elsewhere.serve import EngineDoor, serve
        from broker_core.server.tls import TlsOptions
    except ModuleNotFoundError as error:
        raise OptionError(
            f"the package {error.name} is not installed", "pip install '.[http]' in a checkout"
        ) from error
    if options.audit and not os.path.isdir(options.audit):
        raise OptionError(f"--audit is {options.audit!r}, which is no directory", "make it, or leave it out")
    if bool(options.tls_cert) != bool(options.tls_key):
        raise OptionError("one of --tls-cert and --tls-key is missing", "give both, or none of them")
    tls = TlsOptions(options.tls_cert, options.tls_key) if options.tls_cert else None
    listeners = options.http or [DEFAULT_HTTP]
    for each in listeners:
        parse_listen(each, "HTTP")
    Doors(tls, allow_plaintext=options.allow_plaintext, http=listeners).check("127.0.0.1", ())
    settings = {_ANSWER: ANSWER_MS, **settings_of(options)}
    door = EngineDoor(
        listeners,
        read_users(options.users) if options.users else {},
        tls,
        options.open_metrics,
        options.audit or "",
        options.url,
    )
    engine = connect(options.url, settings=settings)
    with closing(engine):
        return serve(engine, connect_admin(options.url, settings=settings), door, options.log_format)
