"""What callers of Flight do that the audit log has: topology, users and permissions, decisions by hand,
refusals.

Not here: logins (``access/logins.py``), the file (``access/audit.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from broker_core.broker.topology.virtual_hosts import LIMITS
from broker_core.core.errors import TxmqError
from broker_core.server.access.audit import Audit
from broker_core.server.access.caller import Caller

logger = logging.getLogger("txmq.flight")

# the words of ``admin.`` for users, permissions and virtual hosts, with the arguments that are written; None:
# no line
ACCOUNTS: dict[str, tuple[str, ...] | None] = {
    "users": None,
    "add_user": ("name", "tags"),
    "set_password": ("name",),
    "set_tags": ("name", "tags"),
    "delete_user": ("name",),
    "permissions": None,
    "set_permissions": ("user", "vhost", "configure", "write", "read"),
    "clear_permissions": ("user", "vhost"),
    "set_topic_permissions": ("user", "vhost", "exchange", "write", "read"),
    "clear_topic_permissions": ("user", "vhost", "exchange"),
    "give_app": ("app_id", "user", "vhost"),
    "vhosts": None,
    "add_vhost": ("name", *LIMITS),
    "limit_vhost": ("name", *LIMITS),
    "delete_vhost": ("name",),
    "policies": None,
    "set_policy": ("name", "vhost", "operator", "pattern", "apply_to", "priority", "definition"),
    "delete_policy": ("name", "vhost", "operator"),
    "export_definitions": (),
    "import_definitions": ("vhost", "check"),
}
# the arguments that are written, by call
WRITTEN: dict[str, tuple[str, ...]] = {
    "channel.exchange_declare": ("exchange", "type"),
    "channel.exchange_delete": ("exchange",),
    "channel.queue_declare": ("queue",),
    "channel.queue_delete": ("queue",),
    "channel.queue_purge": ("queue",),
    "channel.queue_bind": ("queue", "exchange", "routing_key"),
    "channel.queue_unbind": ("queue", "exchange", "routing_key"),
    "admin.close": ("id",),
    "admin.commit": ("xid", "of"),
    "admin.rollback": ("xid", "of"),
    "admin.rollback_all": ("of",),
    "get.backup": (),
    "admin.skip_damaged": ("queue", "check"),
    "engine.release": ("app_id", "queue", "force"),
    "engine.skip": ("app_id", "sequence", "to"),
    "engine.note": ("app_id", "sequence", "name"),
    **{f"admin.{word}": written for word, written in ACCOUNTS.items() if written is not None},
}


def carried_out(audit: Audit, caller: Caller, call: str, given: Mapping[str, object]) -> None:
    names = WRITTEN.get(call)
    if names is None or given.get("passive"):
        return
    what = {("of" if name == "user" else name): given[name] for name in names if name in given}
    audit.record(
        call, caller.identity.user, caller.address, listener="flight", **_where(caller, call), **what
    )


def refused(audit: Audit, caller: Caller, call: str, error: TxmqError) -> None:
    what = {"listener": "flight", "vhost": caller.state.vhost, "asked": call, "why": error.summary}
    audit.record("refused", caller.identity.user, caller.address, **what)
    logger.info("a call of user '%s' at %s is refused: %s", caller.identity.user, caller.address, error)


def _where(caller: Caller, call: str) -> dict[str, str]:
    """The virtual host of the caller, but for calls that are about the broker, or name one."""
    return {} if call.removeprefix("admin.") in ACCOUNTS else {"vhost": caller.state.vhost}
