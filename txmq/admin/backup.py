"""``txmq backup``: a copy of the data directory of a running broker.

Not here: how it is made (``broker_core/client/backup.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from broker_core.errors import OptionError
from txmq.address import client_at
from txmq.output import done

Add = Callable[..., argparse.ArgumentParser]


def arguments(commands: object, add: Add) -> None:
    """``add``: as ``cli._command``."""
    command = add(
        commands,
        "backup",
        _backup,
        "copy the data directory while its broker runs",
        address=True,
        other_place=True,
    )
    command.add_argument("directory", metavar="DIR", nargs="?", help="as --data DIR")
    command.add_argument("--to", metavar="NEWDIR", required=True, help="created; must be absent or empty")


def _backup(options: argparse.Namespace) -> int:
    from broker_core.client.backup import backup

    if options.directory is not None:
        if options.data is not None:
            raise OptionError("both DIR and --data are given", "give one of them")
        options.data, options.url = options.directory, None
    if options.data is None and options.url is None:
        raise OptionError("no broker is named", "give DIR, or --url of a broker elsewhere")
    made = backup(client_at(options).address, options.to, options.timeout)
    text = (
        f"{made.directory}: {made.files} files, {made.size_bytes / 1e6:.1f} MB; check it with `txmq verify`"
    )
    return done(options, text, **dataclasses.asdict(made))
