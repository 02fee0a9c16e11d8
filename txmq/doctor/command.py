"""``txmq doctor``: checks an installation, and says what to do.

Not here: the checks, which are imported when the command runs.
Invariant: nothing is changed, except that files are written and deleted again to try a file system.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from broker_core.address import DEFAULT_AMQP, DEFAULT_PORT
from broker_core.errors import OptionError, TxmqError
from txmq.address import engine_at
from txmq.login import arguments as login_arguments
from txmq.output import print_json, print_lines

if TYPE_CHECKING:
    from txmq.doctor.finding import Finding

DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"


def arguments(parser: argparse.ArgumentParser) -> None:
    broker = parser.add_mutually_exclusive_group()
    broker.add_argument("--data", metavar="DIR", help="check this data directory, there or to be made")
    broker.add_argument("--url", help="check that this broker answers: txmq://host:port or kafka://host:9092")
    parser.add_argument("--settings", metavar="FILE", help="lines NAME=VALUE for Kafka: kafka.sasl...")
    parser.set_defaults(vhost=None, timeout=0.0)
    login_arguments(parser)
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help=f"check that `txmq serve` can use it; default {DEFAULT_LISTEN}"
    )
    parser.add_argument("--amqp", metavar="HOST:PORT", help=f"the same for AMQP; default {DEFAULT_AMQP}")


def doctor(options: argparse.Namespace) -> int:
    """Print what was found. The exit code: 1 if there is a problem."""
    from txmq.doctor.finding import lines

    found = list(_findings(options))
    problems = sum(each.state == "problem" for each in found)
    if options.json:
        print_json([dataclasses.asdict(each) for each in found])
    else:
        print_lines(*lines(found))
        print_lines(f"{problems} problem{'s' * (problems != 1)}" if problems else "no problems")
    return 1 if problems else 0


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
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
            "for streams: pip install 'txmq[spark]'",
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
    for check, given, usual in (
        ("listen", options.listen, DEFAULT_LISTEN),
        ("amqp", options.amqp, DEFAULT_AMQP),
    ):
        yield from port(check, given or usual, f"--{check}", asked=given is not None, data=options.data)


def _broker(options: argparse.Namespace) -> Iterator[Finding]:
    from txmq.doctor.finding import ok, problem

    try:
        identity = engine_at(options).identity()
    except OptionError:
        raise
    except TxmqError as error:
        yield problem("broker", error.summary, "start it, or name another one with --url")
    else:
        yield ok("broker", f"{options.url} answers (id {identity})")
