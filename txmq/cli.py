"""The command line: ``txmq serve`` and the commands for operators.

Not here: rules of the broker; each command makes one or two calls. Lists are aligned tables, or JSON with
``--json``. An error is one line on stderr and exit code 1; a wrong command line is exit code 2. ``txmq
status`` has two codes more.
"""

from __future__ import annotations

import base64
import dataclasses
import getpass
import os
import sys
from collections.abc import Sequence
from datetime import timezone

import click
from click.shell_completion import get_completion_class, shell_complete

from broker_core import __version__
from broker_core.admin import NOBODY
from broker_core.core.errors import (
    AccessRefused,
    OptionError,
    RemoteProtocolError,
    TxmqError,
    UnknownTransaction,
    one_line,
)
from broker_core.engine import Engine
from broker_core.message.properties import Properties
from txmq import accounts, channels, ledger, move, policies, serve, topology, vhosts  # noqa: F401  they declare commands
from txmq.address import BROKER, admin_at, app_names, client_at, engine_at, queue_names
from txmq.admin import backup, damage, definitions, publish, status, top  # noqa: F401
from txmq.admin.screen import watch
from txmq.command.declare import (
    COMPLETE_VARIABLE,
    ROOT,
    WATCH,
    YES,
    Options,
    argument,
    command,
    one_of,
    option,
)
from txmq.command.values import Misuse, count
from txmq.doctor import command as doctor  # noqa: F401
from txmq.output import Row, confirm, done, list_command, print_lines, report, script, show

OF = option("--of", "USER", "the user who prepared it: see `txmq tx list`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if COMPLETE_VARIABLE in os.environ:
            return shell_complete(ROOT, {}, "txmq", COMPLETE_VARIABLE, os.environ[COMPLETE_VARIABLE])
        options = parsed(words)
        code = watch(options) if getattr(options, "watch", None) else int(options.command(options))
        sys.stdout.flush()
        return code
    except click.UsageError as error:
        if error.ctx is not None:
            pieces = error.ctx.command.collect_usage_pieces(error.ctx)
            print_lines(f"usage: {' '.join([error.ctx.command_path, *pieces])}", error=True)
        print_lines(f"txmq: {' '.join(error.format_message().split())}", error=True)
        raise SystemExit(error.exit_code) from None
    except click.exceptions.Exit as ended:  # --help, --version
        return ended.exit_code
    except TxmqError as error:
        print_lines(f"txmq: {one_line(error)}", error=True)
        return 2 if isinstance(error, Misuse) else 1
    except BrokenPipeError:  # the reader of the output (head) has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        return 130
    except EOFError:  # of a terminal that was asked for a password
        print_lines("txmq: the input ended before the answer", error=True)
        return 1


def parsed(arguments: Sequence[str]) -> Options:
    """Raises UsageError."""
    with ROOT.make_context("txmq", list(arguments)) as context:
        options: Options = ROOT.invoke(context)
    return options


click.version_option(__version__, message="txmq %(version)s")(ROOT)


@command(
    "completion",
    "print the completion script of a shell",
    argument("SHELL", "bash, zsh or fish", type=click.Choice(("bash", "zsh", "fish"))),
    json=False,
)
def _completion(options: Options) -> int:
    shell_class = get_completion_class(options.shell)
    assert shell_class is not None
    print_lines(*shell_class(ROOT, {}, "txmq", COMPLETE_VARIABLE).source().splitlines())
    return 0


# -- commands ------------------------------------------------------------------------------------------------


list_command(
    "app list",
    "list Spark apps with their queues, progress and lag",
    lambda options: engine_at(options).apps(),
    *BROKER,
    WATCH,
)
list_command(
    "app staged",
    "list staged batches that are not decided",
    lambda options: engine_at(options).staged_batches(),
    *BROKER,
    WATCH,
)


@command(
    "app discard",
    "discard a staged batch whose driver died",
    *BROKER,
    argument("TOKEN"),
    option("--of", "USER", "the user who opened it: see `txmq app staged`"),
    YES,
)
def _discard(options: Options) -> int:
    client = engine_at(options)
    batches = [each for each in client.staged_batches() if each.token == options.token]
    batch = next((each for each in batches if options.of in (None, each.user)), None)
    if batch is None:
        raise UnknownTransaction(
            f"no staged batch has the token '{options.token}'", "list the open ones with `txmq app staged`"
        )
    confirm(
        options,
        f"discard drops {batch.rows} rows that batch {batch.batch_id} of app {batch.app_id!r} has "
        f"staged{' from ' * bool(batch.client)}{batch.client}",
    )
    client.rollback_batch(options.token, of=options.of)
    return done(options, f"discarded {options.token}", token=options.token, state="rolled_back")


@command("tx commit", "commit a prepared transaction", *BROKER, argument("XID"), OF, YES)
def _commit(options: Options) -> int:
    _preview(options, "commit")
    dropped = client_at(options).commit(options.xid, of=options.of, by_hand=True)
    lost = f"; dropped {dropped} messages or acks for queues that no longer exist" if dropped else ""
    return done(
        options, f"committed {options.xid}{lost}", xid=options.xid, state="committed", dropped=dropped
    )


@command(
    "tx rollback",
    "roll back a prepared transaction, or all of a user",
    *BROKER,
    argument("XID", required=False),
    OF,
    option("--all", "", "all that the user of --of (default: you) has prepared in this virtual host"),
    YES,
)
def _rollback(options: Options) -> int:
    if options.all == bool(options.xid):
        raise Misuse("rollback takes an XID or --all", "`txmq tx list` lists the transactions")
    if options.all:
        return _rollback_all(options)
    _preview(options, "rollback")
    client_at(options).rollback(options.xid, of=options.of, by_hand=True)
    return done(options, f"rolled back {options.xid}", xid=options.xid, state="rolled_back")


@command(
    "tx forget",
    "forget that a transaction was decided by hand, in place of its manager",
    *BROKER,
    argument("XID"),
    OF,
    YES,
)
def _forget(options: Options) -> int:
    client = client_at(options)
    state = client.outcome(options.xid, of=options.of)
    confirm(options, f"forget keeps from the manager of {options.xid} that it is {state}")
    client.forget(options.xid, of=options.of)
    return done(options, f"forgot {options.xid}", xid=options.xid, state="forgotten")


def _rollback_all(options: Options) -> int:
    whose = f"of user '{options.of}'" if options.of else "of your own"
    count = client_at(options).rollback_all
    confirm(options, f"rollback ends all prepared transactions {whose} for good")
    ended = count(of=options.of, by_hand=True)
    if not ended:
        accounts.require_user(options, options.of)
    return done(
        options, f"rolled back {ended} transactions {whose}", of=options.of, state="rolled_back", ended=ended
    )


def _preview(options: Options, verb: str) -> None:
    """Asks, if there is such a transaction. Who may not list them is told no more."""
    try:
        found = [each for each in client_at(options).prepared() if each.xid == options.xid]
    except AccessRefused:
        confirm(options, f"{verb} ends transaction {options.xid} for good")
        return
    for each in found:
        if options.of in (None, each.user):
            what = f"{each.publishes} publishes to {', '.join(each.to) or 'no queue'} and {each.settles} acks"
            confirm(options, f"{verb} ends transaction {options.xid} for good, with {what}")
            return


@command(
    "app unapplied",
    "list rows of decided batches that are not in their table yet",
    *BROKER,
    WATCH,
    argument("APP", shell_complete=app_names),
    option("--rows", "N", "also show the first N rows of each; default none", type=count, default=0),
)
def _unapplied(options: Options) -> int:
    from txmq.skip import waiting  # Arrow's Parquet only here

    found = waiting(engine_at(options), options.app, options.rows)
    if not found:
        ledger.require_app(options)
    return show(options, found)


@command(
    "app skip",
    "write unapplied rows to files in place of their table (stop the query first)",
    *BROKER,
    argument("APP", shell_complete=app_names),
    argument("SEQUENCE", "the batch, as `txmq app unapplied` lists it", type=count),
    *one_of(
        option("--to", "DIR", "a directory for Parquet files; created if missing"),
        option(
            "--queue", "QUEUE", "with --refused: as dead letters to this queue", shell_complete=queue_names
        ),
        needed=True,
    ),
    option("--table", "TABLE", "only this table or function; default: all"),
    *one_of(
        option("--lost", text="also rows whose data files are gone"),
        option(
            "--refused",
            text="only what the table refuses, with the reason: the next start of the query writes these "
            "rows, and applies the others",
        ),
    ),
    YES,
)
def _skip(options: Options) -> int:
    from txmq.skip import skip, skip_rows, waiting

    if options.to is None and not options.refused:
        raise Misuse("--queue is for --refused", "add --refused, or name a directory with --to")
    parts = [
        f"{part['rows']} rows for {part['to']}"
        for part in waiting(engine_at(options), options.app)
        if part["sequence"] == options.sequence and options.table in (None, part["to"])
    ]
    if parts:
        which = "what a table refuses of" if options.refused else "all of"
        confirm(options, f"skip takes {which} {', '.join(parts)} out of app {options.app}")
    if options.refused:
        to = skip_rows(
            engine_at(options), options.app, options.sequence, options.to, options.queue, options.table
        )
        verb, where = ("writes", to) if options.queue is None else ("publishes", f"queue {options.queue}")
        text = (
            f"the next start of the query {verb} the rows of batch {options.sequence} that a table refuses "
            f"to {where}, and applies the others"
        )
        return done(options, text, app=options.app, sequence=options.sequence, rows_to=to)
    files = skip(
        engine_at(options), options.app, options.sequence, options.to, options.table, lost=options.lost
    )
    text = f"skipped batch {options.sequence} of app {options.app}: {', '.join(files)}"
    return done(options, text, app=options.app, sequence=options.sequence, files=files)


@command(
    "app release",
    "release a queue from the app that owns it",
    *BROKER,
    argument("APP", shell_complete=app_names),
    argument("QUEUE", shell_complete=queue_names),
    option("--force", text="even if the app has not finished: see docs/ledger.md"),
    YES,
)
def _release(options: Options) -> int:
    engine = engine_at(options)
    for app in engine.apps():
        if app.app_id == options.app and options.queue in app.queues:
            left = f"{app.lag} messages to read"
            confirm(options, f"release takes queue {options.queue} from app {app.app_id}, which has {left}")
    engine.release(options.app, options.queue, force=options.force, by=_user())
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


@command(
    "message peek",
    "show messages of a queue without consuming them",
    *BROKER,
    argument("QUEUE", shell_complete=queue_names),
    option("--limit", "N", "at most N messages; default 10", type=count, default=10),
    option("--offset", "N", "begin at this offset; default: the oldest message not settled", type=count),
)
def _peek(options: Options) -> int:
    engine = engine_at(options)
    logs = engine.logs([options.queue])
    starts = dict.fromkeys(logs, options.offset) if options.offset is not None else None
    rows: list[Row] = []
    for log, found in engine.available(logs, starts).items():
        rows += _peek_rows(engine, log, found.start, found.end, options.limit - len(rows))
    if not rows and options.offset is not None:
        end = max(found.end for found in engine.available(logs).values())
        if options.offset > end:
            raise OptionError(f"{options.queue!r} has no offset {options.offset} yet", f"the next is {end}")
    return show(options, [_message_row(row, as_json=options.json) for row in rows])


def _peek_rows(engine: Engine, log: str, start: int, end: int, limit: int) -> list[Row]:
    rows: list[Row] = []
    while start < end and len(rows) < limit:
        stop = min(end, start + max(limit, 100))  # settled offsets have no rows
        for batch in engine.browse([(log, start, stop)]):
            rows += batch.slice(0, limit - len(rows)).to_pylist()
        start = stop
    return rows


def _message_row(row: Row, *, as_json: bool) -> Row:
    encoded = row.pop("properties")
    try:
        properties = dataclasses.asdict(Properties.decode(encoded))
    except RemoteProtocolError:  # damaged: show the bytes
        properties = {"damaged": {"base64": base64.b64encode(encoded).decode()}}
    fields = {name: value for name, value in properties.items() if value is not None and value != {}}
    body = row.pop("body")
    try:
        text: object = body.decode()
    except UnicodeDecodeError:
        text = {"base64": base64.b64encode(body).decode()} if as_json else repr(body)
    row["timestamp"] = row["timestamp"].astimezone(timezone.utc).isoformat()
    return {**row, "properties": fields, "body": text}


@command(
    "broker setup",
    "print the topics and rights to prepare on Kafka",
    *BROKER,
    option("--principal", "USER", f"whose rights; default {NOBODY}", default=NOBODY),
    *(
        option(f"--{name}", name.upper(), f"{of}; may be repeated", multiple=True)
        for name, of in (
            ("app", "an appId"),
            ("queue", "a queue that is read and published to"),
            ("source", "a queue that is only read"),
            ("target", "a queue that is only published to"),
        )
    ),
)
def _setup(options: Options) -> int:
    sources, targets = ([*options.queue, *more] for more in (options.source, options.target))
    prepared = admin_at(options).prepare(options.principal, options.app, sources, targets)
    return report(options, prepared, script(prepared))


@command("broker verify", "check a data directory without changing it", argument("DIRECTORY", value="DIR"))
def _verify(options: Options) -> int:
    from broker_core.store.salvage.verify import verify  # reads the files directly

    found = verify(options.directory)
    lines = [
        f"{found.path}: {found.segments} segments with {found.blocks} blocks of {found.rows} rows, "
        f"{found.inbox_rows} rows in the catalog, {found.records} records, {found.size_bytes} bytes",
        *found.problems,
        *(f"the next start repairs: {text}" for text in found.repairs),
        "every checksum and reference holds" if found.ok else f"{len(found.problems)} problems",
    ]
    report(options, {**dataclasses.asdict(found), "ok": found.ok}, lines)
    return 0 if found.ok else 1


@command(
    "broker salvage",
    "copy intact data to a new data directory",
    argument("DIRECTORY", "only read; no broker may use it", "DIR"),
    option("--to", "NEWDIR", "created; must be absent or empty", required=True),
)
def _salvage(options: Options) -> int:
    from broker_core.store.salvage.salvage import salvage  # reads the files directly

    found = salvage(options.directory, options.to)
    messages = ", ".join(f"{count} in '{queue}'" for queue, count in found.messages.items()) or "no queues"
    lines = [
        f"{found.to}: {found.blocks} blocks of {found.rows} rows, {found.inbox_rows} rows in the catalog; "
        f"messages: {messages}",
        *(
            f"lost: queue '{lost.queue}', offsets {lost.start} to {lost.end - 1} "
            f"({lost.end - lost.start} messages): {lost.where}: {lost.why}"
            for lost in found.lost
        ),
        *(f"lost: {text}" for text in found.losses),
        *["nothing was lost"] * found.whole,
    ]
    return report(options, {**dataclasses.asdict(found), "whole": found.whole}, lines)
