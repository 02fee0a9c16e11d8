"""``txmq broker export`` and ``txmq broker import``: definitions of a broker, in the form of RabbitMQ.

Not here: what they are (``broker_core/broker/definitions.py``).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

from broker_core.admin import Skipped
from broker_core.client.accounts import RemoteAccounts
from broker_core.core.errors import OptionError
from txmq.address import BROKER, client_at
from txmq.command.declare import Options, argument, command, option
from txmq.output import done, print_lines, report

MAX_BYTES = 64 * 1024 * 1024


@command(
    "broker export",
    "write users, permissions, queues and bindings as JSON",
    *BROKER,
    option("--to", "FILE", "a file that only its owner can read; default: standard output"),
)
def _export(options: Options) -> int:
    found = RemoteAccounts(client_at(options)).export_definitions()
    _say_skipped("exported", found.skipped)
    text = json.dumps(found.definitions, indent=2, ensure_ascii=False, sort_keys=True)
    if options.to is None:
        return report(options, found.definitions, json.dumps(found.definitions, indent=2).splitlines())
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(options.to, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise OptionError(f"--to {options.to} cannot be made: {error.strerror}", "name a new file") from error
    return done(options, f"wrote {options.to}, which has the hashes of passwords", to=options.to)


@command(
    "broker import",
    "import users, permissions, queues and bindings from a file",
    *BROKER,
    argument("FILE", "of RabbitMQ (rabbitmqctl export_definitions) or `txmq broker export`"),
    option("--check", text="only say what would be done"),
)
def _import(options: Options) -> int:
    found = RemoteAccounts(client_at(options)).import_definitions(_read(options.file), check=options.check)
    if not options.json:
        _say_skipped("imported", found.skipped)
    what = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in found.counts.items() if count)
    text = (
        f"{'would import' if options.check else 'imported'} {what or 'nothing'}; {len(found.skipped)} skipped"
    )
    return done(options, text, **dataclasses.asdict(found), check=options.check)


def _read(name: str) -> dict[str, object]:
    """Raises OptionError."""
    try:
        if Path(name).stat().st_size > MAX_BYTES:
            raise OptionError(f"{name} has more than {MAX_BYTES} bytes", "divide it")
        found = json.loads(Path(name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{name} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(f"{name} has no JSON object, but a {type(found).__name__}")
    return found


def _say_skipped(verb: str, skipped: Iterable[Skipped]) -> None:
    for each in skipped:
        where = f" in virtual host {each.vhost!r}" if each.vhost else ""
        print_lines(f"not {verb}: {each.kind} {each.name!r}{where}: {each.why}", error=True)
