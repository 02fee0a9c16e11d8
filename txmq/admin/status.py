"""``txmq status``: whether a broker answers, and whether an alarm is on, for an operator and for a probe.

Invariant: it starts no broker, and ends within seconds.
"""

from __future__ import annotations

import dataclasses

from broker_core.admin import BrokerStatus, Level
from broker_core.client import starter
from broker_core.client.admin import status
from broker_core.client.broker import BrokerClient
from broker_core.core.address import bracketed, parse_address
from broker_core.core.credentials import Credentials
from broker_core.core.errors import ConnectionFailed, one_line
from txmq.address import BROKER, client_at, require_directory
from txmq.command.declare import WATCH, Options, command
from txmq.login import credentials
from txmq.output import print_lines, report

ALARM, NO_ANSWER = 3, 4  # exit codes
MiB = 1024 * 1024


@command("status", "show the health of a broker (exit codes for probes)", *BROKER, WATCH)
def _status(options: Options) -> int:
    try:
        with _client(options) as client:
            found = status(client)
    except ConnectionFailed as error:
        print_lines(f"txmq: {one_line(error)}", error=True)
        return NO_ANSWER
    report(options, {**dataclasses.asdict(found), "alarms": found.alarms}, lines(found))
    return ALARM if found.alarms else 0


def _client(options: Options) -> BrokerClient:
    """Raises ConnectionFailed: no broker has the directory."""
    if options.data is None:
        return client_at(options)
    require_directory(options)
    running = starter.find(options.data, lambda _endpoint: True)
    if running is None:
        raise ConnectionFailed(f"no broker runs for {options.data}", "start it with `txmq serve`")
    parse_address(None, options.data, credentials(options), options.vhost)
    return BrokerClient(
        f"txmq://{bracketed(running.host)}:{running.port}",
        credentials=Credentials(token=running.token),
        connect_s=options.timeout,
    )


def lines(found: BrokerStatus) -> list[str]:
    rows = {
        "version": found.version,
        "uptime": _duration(found.uptime_s),
        "data": found.directory or "in memory",
        "process": str(found.pid),
        "listens": " ".join(found.listens),
        "alarms": ", ".join(found.alarms) or "none",
        **{level.name: _level(level) for level in found.levels},
        "queues": f"{found.queues} in {found.vhosts} virtual hosts",
        "messages": f"{found.messages}, {found.unacknowledged} of them unacknowledged",
        "connections": f"{found.connections} of AMQP, {found.channels} channels",
        "prepared": str(found.prepared),
        "staged": f"{found.staged} batches",
        "unapplied": f"{found.unapplied} batches",
        "lag": "none" if found.lag_s is None else f"{found.lag_s:.1f} s, of the app that is furthest behind",
    }
    width = max(map(len, rows))
    return [f"{name.ljust(width)}  {value}" for name, value in rows.items()]


def _level(level: Level) -> str:
    texts = [str(n) if level.name == "files" else f"{n / MiB:.1f} MiB" for n in (level.found, level.limit)]
    return f"{texts[0]}, limit {texts[1]}{'  ALARM' if level.alarm else ''}"


def _duration(seconds: float) -> str:
    days, rest = divmod(int(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    return f"{days} d {hours:02d}:{rest // 60:02d}:{rest % 60:02d}"
