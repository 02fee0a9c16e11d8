"""The command line: ``txmq serve`` and the commands for operators.

Not here: rules of the broker; each command makes one or two calls. Lists are aligned tables, or JSON with
``--json``. An error is one line on stderr and exit code 1; a wrong command line is exit code 2. ``txmq
status`` has two codes more.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import getpass
import os
from collections.abc import Callable, Sequence
from datetime import timezone
from typing import Any

from broker_core import __version__
from broker_core.address import DEFAULT_PORT
from broker_core.admin import NOBODY
from broker_core.engine import Engine
from broker_core.errors import (
    OptionError,
    RemoteProtocolError,
    TxmqError,
    UnknownTransaction,
)
from broker_core.message.properties import Properties
from txmq import accounts, channels, move, topology, vhosts
from txmq.address import URL_VARIABLE, admin_at, client_at, engine_at
from txmq.admin import backup, definitions, publish, status
from txmq.doctor.command import arguments as doctor_arguments
from txmq.doctor.command import doctor
from txmq.ledger import ledger
from txmq.limits import count, seconds
from txmq.login import arguments as login_arguments
from txmq.output import Row, done, print_json, print_lines, script, show
from txmq.serve import serve
from txmq.serve_options import arguments as serve_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    options = _parser().parse_args(arguments)
    if getattr(options, "url", "") is None and options.data is None:
        options.url = os.environ.get(URL_VARIABLE)
    try:
        return int(options.command(options))
    except TxmqError as error:
        print_lines(f"txmq: {' '.join(str(error).split())}", error=True)
        return 1
    except BrokenPipeError:  # the reader of the output (head) has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="txmq", description="Run, inspect and operate a txmq broker.")
    parser.add_argument("--version", action="version", version=f"txmq {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve_arguments(_command(commands, "serve", serve, "run the broker of a data directory until SIGTERM"))
    status.arguments(commands, _command)
    _add_lists(commands)
    _add_decisions(commands)
    topology.arguments(commands, _command)
    move.arguments(commands, _command)
    channels.arguments(commands, _command)
    publish.arguments(commands, _command)
    _add_messages(commands)
    _add_setup(commands)
    accounts.arguments(commands, _command)
    vhosts.arguments(commands, _command)
    definitions.arguments(commands, _command)
    backup.arguments(commands, _command)
    doctor_arguments(_command(commands, "doctor", doctor, "check this installation, and say what to do"))
    verify = _command(commands, "verify", _verify, "check a data directory and change nothing")
    verify.add_argument("directory", metavar="DIR")
    salvage = _command(commands, "salvage", _salvage, "copy the intact data to a new data directory")
    salvage.add_argument("directory", metavar="DIR", help="only read; no broker may use it")
    salvage.add_argument("--to", metavar="NEWDIR", required=True, help="created; must be absent or empty")
    return parser


def _command(
    commands: Any,
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
    *,
    address: bool = False,
    other_place: bool = False,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + "."
    )
    parser.set_defaults(command=command)
    parser.add_argument("--json", action="store_true", help="print JSON")
    if address:
        broker = parser.add_mutually_exclusive_group(
            required=not other_place and URL_VARIABLE not in os.environ
        )
        broker.add_argument(
            "--url",
            help=f"a running broker: txmq[s]://host:{DEFAULT_PORT}[/VHOST], or kafka://host:9092; "
            f"default: {URL_VARIABLE} of the environment",
        )
        broker.add_argument("--data", metavar="DIR", help="the broker of this directory, started if needed")
        parser.add_argument("--vhost", metavar="NAME", help="with --data; a url has it as its path")
        parser.add_argument(
            "--timeout",
            metavar="SECONDS",
            type=seconds,
            default=0.0,
            help="how long to wait for a broker that does not listen; default: not at all",
        )
        parser.add_argument("--settings", metavar="FILE", help="lines NAME=VALUE for Kafka: kafka.sasl...")
        login_arguments(parser)
    return parser


def _add_lists(commands: Any) -> None:
    apps = _command(
        commands, "apps", _apps, "list the pipelines with their queues and progress", address=True
    )
    apps.add_argument(
        "chown", metavar="chown APP USER", nargs="*", help="give the app to another user instead"
    )
    for name in ("staged", "attempts"):  # two names of one list
        _command(commands, name, _attempts, "list what is staged and not decided", address=True)


def _add_decisions(commands: Any) -> None:
    for name, command, text in (
        ("commit", _commit, "commit a prepared transaction"),
        ("rollback", _rollback, "roll back a prepared transaction"),
    ):
        decision = _command(commands, name, command, text, address=True)
        decision.add_argument("xid", metavar="XID")
        decision.add_argument("--of", metavar="USER", help="who named it, as `txmq transactions` lists it")
    decided = _command(
        commands, "ledger", ledger, "list decided batches of a pipeline", address=True, other_place=True
    )
    decided.add_argument("app", metavar="APP")
    decided.add_argument("--batch", metavar="N", type=count, help="only the batch with this sequence")
    decided.add_argument(
        "--table", metavar="PATH", help="from a Delta ledger on a disk of this host, instead of a broker"
    )
    unapplied = _command(commands, "unapplied", _unapplied, "list decided, unapplied rows", address=True)
    unapplied.add_argument("app", metavar="APP")
    unapplied.add_argument(
        "--rows", metavar="N", type=count, default=0, help="also show the first N rows of each; default none"
    )
    skip = _command(commands, "skip", _skip, "write unapplied rows to files (stop the query)", address=True)
    skip.add_argument("app", metavar="APP")
    skip.add_argument(
        "sequence", metavar="SEQUENCE", type=count, help="the batch, as `txmq unapplied` lists it"
    )
    where = skip.add_mutually_exclusive_group(required=True)
    where.add_argument("--to", metavar="DIR", help="a directory for Parquet files; created if missing")
    where.add_argument("--queue", metavar="QUEUE", help="with --rows: as dead letters to this queue")
    skip.add_argument("--table", metavar="TABLE", help="only this table or function; default: all")
    how = skip.add_mutually_exclusive_group()
    how.add_argument("--lost", action="store_true", help="also rows whose data files are gone")
    how.add_argument(
        "--rows",
        action="store_true",
        help="only what the table refuses, with the reason: the next start of the query writes these rows, "
        "and applies the others",
    )
    discard = _command(commands, "discard", _discard, "drop an attempt of a lost driver", address=True)
    discard.add_argument("token", metavar="TOKEN")
    discard.add_argument("--of", metavar="USER", help="who opened it, as `txmq staged` lists it")
    release = _command(commands, "release", _release, "release a queue from a pipeline", address=True)
    release.add_argument("app", metavar="APP")
    release.add_argument("queue", metavar="QUEUE")
    release.add_argument(
        "--force", action="store_true", help="also if the pipeline has not finished: see docs/claims.md"
    )


def _add_messages(commands: Any) -> None:
    peek = _command(commands, "peek", _peek, "show messages of a queue; nothing is consumed", address=True)
    peek.add_argument("queue", metavar="QUEUE")
    peek.add_argument("--limit", metavar="N", type=count, default=10, help="maximum; default %(default)s")
    peek.add_argument(
        "--offset",
        metavar="N",
        type=count,
        default=None,
        help="from this offset on; default: the oldest message not settled",
    )


def _add_setup(commands: Any) -> None:
    setup = _command(
        commands, "setup", _setup, "print the topics and rights to prepare on Kafka", address=True
    )
    setup.add_argument(
        "--principal", metavar="USER", default=NOBODY, help="whose rights; default %(default)s"
    )
    for option, of in (
        ("app", "an appId"),
        ("queue", "a queue that is read and published to"),
        ("source", "a queue that is only read"),
        ("target", "a queue that is only published to"),
    ):
        setup.add_argument(
            f"--{option}", metavar=option.upper(), action="append", default=[], help=f"{of}; may be repeated"
        )


# -- commands ------------------------------------------------------------------------------------------------


def _apps(options: argparse.Namespace) -> int:
    match options.chown:
        case []:
            pass
        case ["chown", app, user]:
            return accounts.give_app(options, app, user)
        case words:
            raise OptionError(
                f"txmq apps {' '.join(words)}: there is no such command", "use txmq apps chown APP USER"
            )
    return show(options, (dataclasses.asdict(app) for app in engine_at(options).apps()))


def _attempts(options: argparse.Namespace) -> int:
    return show(options, (dataclasses.asdict(attempt) for attempt in engine_at(options).attempts()))


def _discard(options: argparse.Namespace) -> int:
    client = engine_at(options)
    known = client.attempts()
    if not any(each.token == options.token and options.of in (None, each.user) for each in known):
        raise UnknownTransaction(
            f"no attempt has the token '{options.token}'",
            "list the open ones with `txmq staged`",
        )
    client.rollback_batch(options.token, of=options.of)
    return done(options, f"discarded {options.token}", token=options.token, state="rolled_back")


def _commit(options: argparse.Namespace) -> int:
    dropped = client_at(options).commit(options.xid, of=options.of)
    lost = f"; dropped {dropped} messages or acks for queues that no longer exist" if dropped else ""
    return done(
        options, f"committed {options.xid}{lost}", xid=options.xid, state="committed", dropped=dropped
    )


def _rollback(options: argparse.Namespace) -> int:
    client_at(options).rollback(options.xid, of=options.of)
    return done(options, f"rolled back {options.xid}", xid=options.xid, state="rolled_back")


def _unapplied(options: argparse.Namespace) -> int:
    from txmq.skip import waiting  # Arrow's Parquet only here

    return show(options, waiting(engine_at(options), options.app, options.rows))


def _skip(options: argparse.Namespace) -> int:
    from txmq.skip import skip, skip_rows

    if options.rows:
        to = skip_rows(
            engine_at(options), options.app, options.sequence, options.to, options.queue, options.table
        )
        verb, where = ("writes", to) if options.queue is None else ("publishes", f"queue {options.queue}")
        text = (
            f"the next start of the query {verb} the rows of batch {options.sequence} that a table refuses "
            f"to {where}, and applies the others"
        )
        return done(options, text, app=options.app, sequence=options.sequence, rows_to=to)
    if options.to is None:
        raise OptionError("--queue is for --rows", "add --rows, or name a directory with --to")
    files = skip(
        engine_at(options), options.app, options.sequence, options.to, options.table, lost=options.lost
    )
    text = f"skipped batch {options.sequence} of app {options.app}: {', '.join(files)}"
    return done(options, text, app=options.app, sequence=options.sequence, files=files)


def _release(options: argparse.Namespace) -> int:
    engine_at(options).release(options.app, options.queue, force=options.force, by=_user())
    return done(
        options,
        f"released queue {options.queue} from app {options.app}",
        app=options.app,
        queue=options.queue,
    )


def _user() -> str:
    """The user of this process, by its name if it has one."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return f"uid {os.getuid()}"


def _peek(options: argparse.Namespace) -> int:
    engine = engine_at(options)
    logs = engine.logs([options.queue])
    starts = dict.fromkeys(logs, options.offset) if options.offset is not None else None
    rows: list[Row] = []
    for log, found in engine.available(logs, starts).items():
        rows += _peeked(engine, log, found.start, found.end, options.limit - len(rows))
    return show(options, [_shown(row, as_json=options.json) for row in rows])


def _peeked(engine: Engine, log: str, start: int, end: int, limit: int) -> list[Row]:
    rows: list[Row] = []
    while start < end and len(rows) < limit:
        stop = min(end, start + max(limit, 100))  # settled offsets have no rows
        for batch in engine.browse([(log, start, stop)]):
            rows += batch.slice(0, limit - len(rows)).to_pylist()
        start = stop
    return rows


def _shown(row: Row, *, as_json: bool) -> Row:
    encoded = row.pop("properties")
    try:
        properties = dataclasses.asdict(Properties.decode(encoded))
    except RemoteProtocolError:  # damaged: show the bytes
        properties = {"damaged": {"base64": base64.b64encode(encoded).decode()}}
    given = {name: value for name, value in properties.items() if value is not None and value != {}}
    body = row.pop("body")
    try:
        text: object = body.decode()
    except UnicodeDecodeError:
        text = {"base64": base64.b64encode(body).decode()} if as_json else repr(body)
    row["timestamp"] = row["timestamp"].astimezone(timezone.utc).isoformat()
    return {**row, "properties": given, "body": text}


def _setup(options: argparse.Namespace) -> int:
    sources, targets = ([*options.queue, *more] for more in (options.source, options.target))
    prepared = admin_at(options).prepare(options.principal, options.app, sources, targets)
    if options.json:
        return show(options, map(dataclasses.asdict, prepared))
    print_lines(*script(prepared))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from broker_core.store.salvage.verify import verify  # reads the files directly

    found = verify(options.directory)
    if options.json:
        print_json({**dataclasses.asdict(found), "ok": found.ok})
    else:
        print_lines(
            f"{found.path}: {found.segments} segments with {found.blocks} blocks of {found.rows} rows, "
            f"{found.inbox_rows} rows in the catalog, {found.records} records, {found.size_bytes} bytes"
        )
        for problem in found.problems:
            print_lines(problem)
        for text in found.repairs:
            print_lines(f"the next start repairs: {text}")
        print_lines("every checksum and reference holds" if found.ok else f"{len(found.problems)} problems")
    return 0 if found.ok else 1


def _salvage(options: argparse.Namespace) -> int:
    from broker_core.store.salvage.salvage import salvage  # reads the files directly

    found = salvage(options.directory, options.to)
    if options.json:
        print_json({**dataclasses.asdict(found), "whole": found.whole})
        return 0
    messages = ", ".join(f"{count} in '{queue}'" for queue, count in found.messages.items()) or "no queues"
    print_lines(
        f"{found.to}: {found.blocks} blocks of {found.rows} rows, {found.inbox_rows} rows in the catalog; "
        f"messages: {messages}"
    )
    for lost in found.lost:
        count = lost.end - lost.start
        print_lines(
            f"lost: queue '{lost.queue}', offsets {lost.start} to {lost.end - 1} ({count} messages): "
            f"{lost.where}: {lost.why}"
        )
    for text in found.losses:
        print_lines(f"lost: {text}")
    if found.doubtful:
        print_lines(
            f"{found.doubtful} of these rows can be parsed and may be wrong: "
            f"{os.path.join(found.to, 'doubtful.arrow')}"
        )
    if found.whole:
        print_lines("nothing was lost")
    return 0
