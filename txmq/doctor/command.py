"""``txmq doctor``: checks an installation, and says what to do.

Not here: the checks, which are imported when the command runs.
Invariant: nothing is changed, except that files are written and deleted again to try a file system.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from broker_core.core.address import DEFAULT_AMQP, DEFAULT_PORT
from broker_core.core.errors import OptionError, TxmqError
from txmq.address import URL_VARIABLE, engine_at
from txmq.command.declare import Options, command, one_of, option
from txmq.login import LOGIN
from txmq.output import report

if TYPE_CHECKING:
    from txmq.doctor.finding import Finding

DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"


@command(
    "doctor",
    "check this installation and say what to fix",
    *one_of(
        option("--data", "DIR", "check this data directory, which may not exist yet"),
        option(
            "--url",
            "URL",
            "check that this broker answers: txmq://host:port or kafka://host:9092",
            envvar=URL_VARIABLE,
        ),
    ),
    option("--settings", "FILE", "lines NAME=VALUE for Kafka: kafka.sasl..."),
    *LOGIN,
    option("--listen", "HOST:PORT", f"check that `txmq serve` can use it; default {DEFAULT_LISTEN}"),
    option("--amqp", "HOST:PORT", f"the same for AMQP; default {DEFAULT_AMQP}"),
)
def doctor(options: Options) -> int:
    """Print what was found. The exit code: 1 if there is a problem."""
    from txmq.doctor.finding import lines

    found = list(_findings(options))
    problems = sum(each.state == "problem" for each in found)
    total = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problems"
    report(options, found, [*lines(found), total])
    return 1 if problems else 0


def _findings(options: Options) -> Iterator[Finding]:
    from txmq.doctor import java, python
    from txmq.doctor.directory import directory
    from txmq.doctor.finding import hint
    from txmq.doctor.port import port

    yield from python.python()
    yield from python.packages()
    if java.spark_home() is None:
        yield hint(
            "spark",
            "not installed: this Python runs the broker, the clients and the command line",
            "for streams: pip install '.[spark]' in a checkout",
        )
    else:
        yield from python.spark_python()
        yield from java.java()
        yield from java.jars()
    if options.url is not None:
        yield from _broker(options)
        return
    if options.data is not None:
        yield from directory(options.data)
    for check, address, usual in (
        ("listen", options.listen, DEFAULT_LISTEN),
        ("amqp", options.amqp, DEFAULT_AMQP),
    ):
        yield from port(check, address or usual, f"--{check}", chosen=address is not None, data=options.data)


def _broker(options: Options) -> Iterator[Finding]:
    from txmq.doctor.finding import ok, problem

    options.vhost, options.timeout = None, 0.0
    try:
        identity = engine_at(options).identity()
    except OptionError:
        raise
    except TxmqError as error:
        yield problem("broker", error.summary, "start it, or name another one with --url")
    else:
        yield ok("broker", f"{options.url} answers (id {identity})")
