"""``txmq vhost``: the virtual hosts of a broker.

Not here: the rules (``broker_core/broker/topology/virtual_hosts.py``).
"""

from __future__ import annotations

from broker_core.client.accounts import RemoteVhosts
from txmq.address import BROKER, client_at
from txmq.command.declare import YES, Options, argument, command, option
from txmq.command.values import Misuse
from txmq.output import confirm, done, list_command

LIMITS = {
    "max_queues": "queues that may be declared",
    "max_connections": "AMQP connections at one time",
    "max_messages": "messages kept in all queues together",
}

NAME = argument("NAME")
LIMIT_OPTIONS = [option(f"--{name.replace('_', '-')}", "N", text, type=int) for name, text in LIMITS.items()]


def _limits(options: Options) -> dict[str, int | None]:
    return {name: getattr(options, name) for name in LIMITS}


def _vhosts(options: Options) -> RemoteVhosts:
    return RemoteVhosts(client_at(options))


@command("vhost add", "add a virtual host", *BROKER, NAME, *LIMIT_OPTIONS)
def _add(options: Options) -> int:
    _vhosts(options).add_vhost(options.name, **_limits(options))
    text = f"added virtual host {options.name}: `txmq permission set` lets users in"
    return done(options, text, vhost=options.name)


list_command(
    "vhost list",
    "list the virtual hosts with their limits",
    lambda options: _vhosts(options).vhosts(),
    *BROKER,
)


@command("vhost limit", "change the limits of a virtual host; -1 for none", *BROKER, NAME, *LIMIT_OPTIONS)
def _limit(options: Options) -> int:
    vhosts, limits = _vhosts(options), _limits(options)
    if set(limits.values()) == {None}:
        names = ", ".join(each.opts[0] for each in LIMIT_OPTIONS)
        raise Misuse("no limit is named", f"give one of {names}; -1 for none")
    vhosts.limit_vhost(options.name, **limits)
    return done(options, f"changed the limits of virtual host {options.name}", vhost=options.name)


@command("vhost delete", "delete a virtual host with everything in it", *BROKER, NAME, YES)
def _delete(options: Options) -> int:
    for each in _vhosts(options).vhosts():
        if each.name == options.name:
            what = f"{each.queues} queues, {each.messages} messages and {each.connections} connections"
            confirm(options, f"delete drops virtual host {options.name} with {what}")
    _vhosts(options).delete_vhost(options.name)
    return done(options, f"deleted virtual host {options.name}", vhost=options.name)
