"""What callers of Flight do that the audit log has: topology, users and permissions, decisions by hand,
refusals.

Not here: logins (``access/logins.py``), the file (``access/audit.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from broker_core.core.errors import TxmqError
from broker_core.server.access.audit import Audit, Record
from broker_core.server.access.caller import Caller

logger = logging.getLogger("txmq.flight")

# the words of ``admin.`` for users, permissions and virtual hosts, which write their lines themselves
ACCOUNTS = (
    *("users", "add_user", "set_password", "set_tags", "delete_user", "permissions", "set_permissions"),
    *("clear_permissions", "set_topic_permissions", "clear_topic_permissions", "give_app", "vhosts"),
    *("add_vhost", "limit_vhost", "delete_vhost", "policies", "set_policy", "delete_policy"),
    *("export_definitions", "import_definitions"),
)
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
    "admin.forget": ("xid", "of"),
    "get.backup": (),
    "admin.skip_damaged": ("queue", "check"),
    "engine.release": ("app_id", "queue", "force"),
    "engine.skip": ("app_id", "sequence", "to"),
    "engine.note": ("app_id", "sequence", "name"),
}


def carried_out(audit: Audit, caller: Caller, call: str, arguments: Mapping[str, object]) -> None:
    names = WRITTEN.get(call)
    if names is None or arguments.get("passive"):
        return
    what = {name: arguments[name] for name in names if name in arguments}
    recorder(audit, caller)(call, vhost=caller.state.vhost, **what)


def recorder(audit: Audit, caller: Caller) -> Record:
    return audit.recorder("flight", caller.identity.user, caller.address)


def refused(audit: Audit, caller: Caller, call: str, error: TxmqError) -> None:
    recorder(audit, caller)("refused", vhost=caller.state.vhost, asked=call, why=error.summary)
    logger.info("a call of user '%s' at %s is refused: %s", caller.identity.user, caller.address, error)
