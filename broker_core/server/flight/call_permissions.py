"""Which permission each Flight call needs in its virtual host: the tables ENGINE, ADMIN and CHANNEL. A call
without an entry is refused.

``hello`` needs a login. Streams have no entry: DoGet needs read on the queues for a browse, also the app for
a read, the app for branches, and the tag administrator for a backup; stage, adopt and DoPut need the app of
the attempt, and write on each exchange that the rows name.

An app belongs to the user who first claimed or opened it (``broker/batch/owners.py``); an administrator may
use each. What a call touches beside the app that it names (reads, attempts, branches) is proved where it is
found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from broker_core.broker import command_permissions
from broker_core.broker.batch.micro_batch import MicroBatches
from broker_core.core import errors
from broker_core.engine import REFUSED, BranchHeader, ReadTicket
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.routing.content import check_user_id
from broker_core.server.access.audit import Audit
from broker_core.server.access.caller import Caller
from broker_core.server.flight import audit
from broker_core.server.flight.clients import FlightClients

# words of ``admin``: of the caller's virtual host
LISTS = ("queues", "exchanges", "bindings", "channels", "connections", "consumers")
Arguments = Mapping[str, Any]
Check = Callable[["CallPermissions", Caller, Arguments], None]

GENERATED = f"amq.gen-{'0' * 32}"  # stands for the name that the broker will choose


def _queues(name: str) -> Check:
    return lambda _call_permissions, caller, args: caller.read(args[name])


def _app(command_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    command_permissions.use_app(caller, args["app_id"])


def _app_and_queues(*names: str) -> Check:
    def check(command_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
        caller.read({queue for name in names for queue in args[name]})
        command_permissions.use_app(caller, args["app_id"])

    return check


def _attempt(command_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    caller.enter()
    command_permissions.require_attempt(caller, args["token"])


def _discard(command_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    if caller.operates:
        return
    if args.get("of") not in (None, caller.identity.user):
        caller.operate("staged batches of other users")
    _attempt(command_permissions, caller, args)


def _tag(require: Callable[[Caller, str], None], what: str) -> Check:
    return lambda _call_permissions, caller, _args: require(caller, what)


def _note(command_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    if args["name"] == REFUSED:
        command_permissions.use_app(caller, args["app_id"])
    else:
        caller.operate("the rows of other apps")


def _refused(command_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    command_permissions.use_app(caller, args["app_id"])
    command_permissions.require_attempt(caller, args["token"])


def _resume(command_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    caller.read({log for entry in args["entries"] for log in entry.ranges})
    command_permissions.use_app(caller, args["app_id"])


def _outcome(_call_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    caller.enter()
    if args.get("of") not in (None, caller.identity.user):
        caller.look("transactions of other users")


def _enter(_call_permissions: CallPermissions, caller: Caller, _args: Arguments) -> None:
    caller.enter()


ENGINE: dict[str, Check] = {
    "identity": _enter,
    **dict.fromkeys(("logs", "offsets", "wait"), _queues("queues")),
    **dict.fromkeys(("log_ids", "available"), _queues("logs")),
    "claim": _app_and_queues("queues", "start"),
    "resolve": _app_and_queues("start", "end"),
    "count": _app_and_queues("ranges"),
    "dead_letter_route": lambda _, caller, args: caller.read([args["queue"]]),
    "ack": _app_and_queues("end"),
    **dict.fromkeys(("open_batch", "commit_batch", "unapplied", "mark_applied", "entries"), _app),
    **dict.fromkeys(("unmirrored", "mark_mirrored", "last_entry", "app"), _app),
    "commit_branches": _attempt,
    "rollback_batch": _discard,
    "publish_refused": _refused,
    "resume": _resume,
    "skip": _tag(Caller.operate, "the rows of other apps"),
    "note": _note,
    "apps": _tag(Caller.look, "the list of apps"),
    "staged_batches": _tag(Caller.look, "the list of staged batches"),
    "release": _tag(Caller.operate, "the queues of other apps"),
}
ADMIN: dict[str, Check] = {
    **{word: _tag(Caller.look, f"the list of {word}") for word in LISTS},
    "status": _tag(Caller.look, "the state of the broker"),
    "close": _tag(Caller.operate, "the channels of others"),
    "prepared": _tag(Caller.look, "the list of prepared transactions"),
    **dict.fromkeys(("commit", "rollback", "rollback_all", "forget", "call_took_place"), _enter),
    **dict.fromkeys(("committed", "outcome", "recover"), _outcome),
    # what these show depends on the permissions of each queue, and is of the caller's apps but with a tag
    **dict.fromkeys(("transaction", "history", "message", "ledger"), _enter),
    "give_up": _tag(Caller.administer, "the data directory"),
    "skip_damaged": _tag(Caller.administer, "what is damaged"),
    **dict.fromkeys(audit.ACCOUNTS, _tag(Caller.administer, "users, permissions and virtual hosts")),
}


def _declare_exchange(_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    name, kind, arguments = args["exchange"], args.get("type", "direct"), args.get("arguments") or {}
    command_permissions.declare_exchange(caller.rights, caller.state.topology, name, kind, arguments)


def _declare_queue(_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    if not args.get("passive", False):
        queue = args.get("queue") or GENERATED
        command_permissions.declare_queue(
            caller.rights, caller.state.topology, queue, args.get("arguments") or {}
        )


def _bind(_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    queue, exchange = args["queue"], args["exchange"]
    command_permissions.bind(
        caller.rights, caller.state.topology, "queue", queue, exchange, args.get("routing_key", "")
    )


def _publish(_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    exchange, routing_key = args.get("exchange", ""), args.get("routing_key", "")
    properties = args.get("properties") or b""
    command_permissions.publish(caller.rights, caller.state.topology, exchange, routing_key, properties)


def _publish_all(_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    for message in args["messages"]:
        _publish(_permissions, caller, message)


def _read(_call_permissions: CallPermissions, caller: Caller, args: Arguments) -> None:
    command_permissions.read_queue(caller.rights, args["queue"])


CHANNEL: dict[str, Check] = {
    "exchange_declare": _declare_exchange,
    "exchange_delete": lambda _, caller, args: command_permissions.delete_exchange(
        caller.rights, args["exchange"]
    ),
    "queue_declare": _declare_queue,
    **dict.fromkeys(("queue_bind", "queue_unbind"), _bind),
    **dict.fromkeys(("queue_purge", "get", "get_at"), _read),
    "queue_delete": lambda _, caller, args: command_permissions.delete_queue(caller.rights, args["queue"]),
    "publish": _publish,
    "publish_all": _publish_all,
    **dict.fromkeys(("ack", "nack", "reject", "recover", "tx_select", "confirm_select"), _enter),
    **dict.fromkeys(
        ("tx_timeout", "tx_current", "tx_commit", "take_returned", "tx_rollback", "prepare"), _enter
    ),
}


class CallPermissions:
    """Its methods raise AccessRefused, but for ``carried_out``."""

    def __init__(self, engines: VhostEngines, broker: LocalBroker, audit: Audit) -> None:
        self._audit = audit
        self.clients = FlightClients()
        self._engines = engines
        self._broker = broker

    def check(self, calls: Mapping[str, Check], word: str, caller: Caller, args: Arguments) -> None:
        """Before ``word`` is carried out with these arguments, which are checked."""
        if calls is CHANNEL and not caller.rights.impersonates:
            for message in args.get("messages", (args,)):
                check_user_id(message.get("properties") or b"", caller.identity.user)
        if caller.rights.everything and caller.administers:
            return
        check = calls.get(word)
        if check is None:
            raise errors.AccessRefused(f"access to {word} refused for user '{caller.identity.user}'")
        check(self, caller, args)

    def carried_out(self, caller: Caller, call: str, args: Arguments) -> None:
        """After it, for the audit log."""
        audit.carried_out(self._audit, caller, call, args)

    def read(self, caller: Caller, ticket: ReadTicket) -> None:
        caller.read({*ticket.ranges, *(log for log, _, _ in ticket.slices)})
        self.use_app(caller, ticket.app_id)

    def read_branches(self, caller: Caller, branches: Iterable[str]) -> None:
        caller.enter()
        with self._broker.look:
            batches = self._batches(caller)
            tokens = {part.token for branch in branches for part in batches.branches.parts(branch)}
            batches.owners.require_tokens(caller.actor, tokens)

    def stage(self, caller: Caller, header: BranchHeader, size_bytes: int = 0) -> None:
        """But for the exchanges, which the rows name. Before anything is written: raises TransactionTooLarge
        if there is no room for ``size_bytes``.
        """
        self.use_app(caller, header.app_id)
        self.require_attempt(caller, header.token)
        self.clients.staged(caller, header.token)
        with self._broker.look:
            batches, actor = self._batches(caller), caller.actor
            batches.branches.superseded(batches.owners.own_header(actor, header), size_bytes, actor.user)

    def require_attempt(self, caller: Caller, token: str) -> None:
        """Its app, or the batch write, must be the caller's."""
        with self._broker.look:
            owners = self._batches(caller).owners
            owners.require_tokens(caller.actor, [owners.own(caller.actor, token)])

    def _batches(self, caller: Caller) -> MicroBatches:
        return self._engines.of(caller.state.vhost).batches

    def use_app(self, caller: Caller, *apps: str) -> None:
        """Whether the caller may act for the apps. It takes none: a claim, an open and a stage do that."""
        caller.enter()
        if not caller.administers:
            with self._broker.look:
                self._batches(caller).owners.require(caller.actor, apps)
