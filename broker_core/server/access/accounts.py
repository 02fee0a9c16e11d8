"""Users and permissions, as an operator changes them.

Not here: the rules (``broker/access/users.py``), logins (``logins.py``). Passwords come as hashes: whoever
sets one hashes it.

Invariant: when the call returns, a change is durable, in force at every listener, and in the audit log.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from broker_core import __version__
from broker_core.admin import Exported, Imported, PermissionInfo, UserInfo
from broker_core.broker import definitions as definitions_module
from broker_core.broker import export, import_pieces
from broker_core.broker.access.administrators import administered, keep_one, require_one
from broker_core.broker.access.users import ADMINISTRATOR, DEFAULT_USER, Users
from broker_core.broker.broker import BrokerState
from broker_core.core import password as passwords
from broker_core.core.address import VHOST
from broker_core.core.change import Change
from broker_core.core.errors import TxmqError
from broker_core.core.failpoint import here
from broker_core.core.pieces import in_order
from broker_core.node.local import LocalBroker
from broker_core.server.access.audit import Auditor, Record

P = ParamSpec("P")
Changes = Callable[[BrokerState, Change], None]
_TAKING = ("set_tags", "set_password", "delete_user")  # what may take the last administrator
_WRITTEN = {"user": "of"}  # as the audit log calls it, which has the caller as its user


class _Checked(TxmqError):
    """Takes back the work that raises it."""

    def __init__(self, done: Imported) -> None:
        super().__init__("only checked")
        self.done = done


def _word(
    word: str, rule: Callable[Concatenate[Users, Change, P], None]
) -> Callable[Concatenate[Accounts, P], None]:
    """A rule of users as a word of the operator, with the rule's signature and text. The audit log has what
    it was given, without the password.
    """
    rule_signature = inspect.signature(rule)
    signature = rule_signature.replace(
        parameters=[each for each in rule_signature.parameters.values() if each.name != "change"]
    )

    @functools.wraps(rule)
    def call(accounts: Accounts, /, *positional: P.args, **keywords: P.kwargs) -> None:
        bound = signature.bind(accounts, *positional, **keywords)
        bound.apply_defaults()
        values = {name: value for name, value in bound.arguments.items() if name != "self"}
        if "password_hash" in values:
            passwords.check_hash(values["password_hash"])
        written = {
            _WRITTEN.get(name, name): value for name, value in values.items() if name != "password_hash"
        }
        accounts._change(
            lambda state, change: rule(state.users, change, *positional, **keywords), word, **written
        )

    call.__annotations__ = {name: kind for name, kind in rule.__annotations__.items() if name != "change"}
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


class Accounts(Auditor):
    """``changed``: called after each change, also of virtual hosts, in the thread that made it."""

    def __init__(self, broker: LocalBroker, record: Record | None = None) -> None:
        super().__init__(record)
        self._broker = broker
        self.changed: list[Callable[[], None]] = []

    def users(self) -> list[UserInfo]:
        with self._broker.look as state:
            saved, listed = dict(state.users.by_name), set(state.users.file_users)
        if not saved and not listed:
            return [UserInfo(DEFAULT_USER, (ADMINISTRATOR,), "default")]
        return [
            UserInfo(
                name,
                tuple(saved[name].tags) if name in saved else (ADMINISTRATOR,),
                "+".join(source for source, names in (("catalog", saved), ("file", listed)) if name in names),
            )
            for name in in_order({*saved, *listed}, str)
        ]

    add_user = _word("add_user", Users.add)
    set_password = _word("set_password", Users.set_password)
    set_tags = _word("set_tags", Users.set_tags)
    set_permissions = _word("set_permissions", Users.permit)
    clear_permissions = _word("clear_permissions", Users.forbid)
    set_topic_permissions = _word("set_topic_permissions", Users.permit_topic)
    clear_topic_permissions = _word("clear_topic_permissions", Users.forbid_topic)
    give_app = _word("give_app", Users.give_app)

    def put_user(self, name: str, password_hash: str, tags: Sequence[str]) -> bool:
        """Adds a user, or sets tags, and the password if a hash is given, of one that exists: in one change.
        Returns whether it is new. Raises OptionError.
        """
        if password_hash:
            passwords.check_hash(password_hash)
        new = False

        def put(state: BrokerState, change: Change) -> None:
            nonlocal new
            new = name not in state.users.by_name
            if new:
                state.users.add(change, name, password_hash, tags)
                return
            state.users.set_tags(change, name, tags)
            if password_hash:
                state.users.set_password(change, name, password_hash)

        self._broker.run(lambda state, change, _now: keep_one(state.users, lambda: put(state, change)))
        self._audit("add_user" if new else "set_tags", name=name, tags=list(tags))
        if password_hash and not new:
            self._audit("set_password", name=name)
        self._notify()
        return new

    def delete_user(self, name: str) -> None:
        """Closes its connections. Raises OptionError."""

        def delete(state: BrokerState, change: Change) -> None:
            state.users.delete(change, name)
            state.prepared.disown(change, name)

        self._change(delete, "delete_user", name=name)

    def permissions(self) -> list[PermissionInfo]:
        with self._broker.look as state:
            users = state.users
            permissions = list(users.permissions.values())
            topics = [each for found in users.topics.values() for each in found.values()]
            trusted = [name for name in {*users.file_users, DEFAULT_USER} if users.trusts(name)]
            vhosts = list(state.virtual_hosts.by_name)
        listed = [
            *(
                PermissionInfo(each.user, each.vhost, "", each.configure, each.write, each.read)
                for each in permissions
            ),
            *(
                PermissionInfo(each.user, each.vhost, each.exchange, "", each.write, each.read)
                for each in topics
            ),
            *(PermissionInfo(name, vhost, "", ".*", ".*", ".*") for name in trusted for vhost in vhosts),
        ]
        return in_order(listed, lambda each: (each.user, each.vhost, each.exchange))

    def export_definitions(self) -> Exported:
        """Returns users with their hashes, permissions, virtual hosts and topology (``export.py``)."""
        with self._broker.look as state:
            found = export.definable(state)
        exported = export.document(found, __version__)
        self._audit("export_definitions")
        return exported

    def import_definitions(
        self, definitions: dict[str, object], vhost: str = VHOST, check: bool = False
    ) -> Imported:
        """Makes true what definitions of RabbitMQ or txmq say, or changes nothing where they are wrong.
        ``vhost``: of what names none. ``check``: only says what would be done. Raises OptionError,
        PreconditionFailed, ...

        1. an administrator who can log in is left; 2. every piece is carried out and taken back; 3. every
        piece is a commit. A broker that is killed between two of them has the first ones: the same import
        again brings the others.
        """
        try:
            found = definitions_module.read(definitions, self._target(vhost))
            self._keep_administrator(found)
            listed = self._broker.state.users.file_users
            pieces, needed = list(import_pieces.pieces(found, listed)), import_pieces.Prerequisites(found)
            done = [self._checked(needed.with_needs(piece)) for piece in pieces]
        except TxmqError as error:
            error.message += " (nothing is changed)"
            raise
        if check:
            return import_pieces.together(found, done)
        done = []
        for number, piece in enumerate(pieces):
            here("accounts.import.piece")
            done.append(self._applied(piece, number, len(pieces)))
        self._audit("import_definitions", vhost=vhost)
        self._notify()
        return import_pieces.together(found, done)

    def _target(self, vhost: str) -> definitions_module.ImportTarget:
        with self._broker.look as state:
            hashes = {name: user.password_hash for name, user in state.users.by_name.items()}
            hosts = state.virtual_hosts
            return definitions_module.ImportTarget(vhost, hosts.strict, list(hosts.by_name), hashes)

    def _keep_administrator(self, found: definitions_module.Definitions) -> None:
        """Raises OptionError."""
        with self._broker.look as state:
            users, listed = dict(state.users.by_name), state.users.file_users
        if found.users and administered(users, listed):
            require_one(users | {user.name: user for user in found.users}, listed)

    def _checked(self, piece: definitions_module.Definitions) -> Imported:
        def work(state: BrokerState, change: Change, now: int) -> Imported:
            raise _Checked(definitions_module.apply(piece, state, change, now))

        try:
            return self._broker.run(work)
        except _Checked as only:
            return only.done

    def _applied(self, piece: definitions_module.Definitions, number: int, pieces: int) -> Imported:
        """Raises what ``apply`` does, where something has changed since the check, or a limit is reached."""

        def work(state: BrokerState, change: Change, now: int) -> Imported:
            return keep_one(state.users, lambda: definitions_module.apply(piece, state, change, now))

        try:
            return self._broker.run(work)
        except TxmqError as error:
            if number:
                error.message += f" ({number} of {pieces} pieces are imported: the same import continues)"
            raise

    def _change(self, change_users: Changes, word: str, **what: Any) -> None:
        def work(state: BrokerState, change: Change, _now: int) -> None:
            state.virtual_hosts.require(what.get("vhost", VHOST))
            if word in _TAKING:
                keep_one(state.users, lambda: change_users(state, change))
            else:
                change_users(state, change)

        self._broker.run(work)
        self._audit(word, **what)
        self._notify()

    def _notify(self) -> None:
        for notify in self.changed:
            notify()
