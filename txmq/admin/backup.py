"""``txmq broker backup``: a copy of the data directory of a running broker.

Not here: how it is made (``broker_core/client/backup.py``).
"""

from __future__ import annotations

import dataclasses

from txmq.address import ANY_BROKER, client_at
from txmq.command.declare import Options, argument, command, option
from txmq.command.values import Misuse
from txmq.output import done


@command(
    "broker backup",
    "copy a data directory while its broker runs",
    *ANY_BROKER,
    argument("DIRECTORY", "as --data DIR", "[DIR]", required=False),
    option("--to", "NEWDIR", "created; must be absent or empty", required=True),
)
def _backup(options: Options) -> int:
    from broker_core.client.backup import backup

    if options.directory is not None:
        if options.data is not None:
            raise Misuse("both DIR and --data are given", "give one of them")
        options.data, options.url = options.directory, None
    if options.data is None and options.url is None:
        raise Misuse("no broker is named", "give DIR, or --url of a broker elsewhere")
    report = backup(client_at(options).address, options.to, options.timeout)
    size = f"{report.files} files, {report.size_bytes / 1e6:.1f} MB"
    text = f"{report.directory}: {size}; check it with `txmq broker verify`"
    return done(options, text, **dataclasses.asdict(report))
