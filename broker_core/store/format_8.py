"""Records of format 8 and before, in which tokens and branches were kept without their user. Pure.

What an app has staged or decided is its owner's since format 9, and a batch write that of its user.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from broker_core.broker.access.users import own_id
from broker_core.broker.state.records import (
    AppUserRecord,
    AttemptRecord,
    LedgerRecord,
    PartRecord,
    Record,
    UserRecord,
    WriteUserRecord,
)


def with_users(records: Iterable[Record]) -> list[tuple[Record, Record]]:
    """Returns each record as it was, and as it is since format 9."""
    known = list(records)
    users: dict[tuple[str, str], str] = {}  # by virtual host and token
    if any(isinstance(each, UserRecord) for each in known):  # else all is the owner's of the directory
        apps = {(each.vhost, each.app_id): each.user for each in known if isinstance(each, AppUserRecord)}
        for each in known:
            if isinstance(each, WriteUserRecord):
                users.setdefault((each.vhost, each.token), each.user)
            elif isinstance(each, (AttemptRecord, LedgerRecord)) and each.app_id:
                users[each.vhost, each.token] = apps.get((each.vhost, each.app_id), "")
    return [(each, _with_user(each, users)) for each in known]


def _with_user(record: Record, users: dict[tuple[str, str], str]) -> Record:
    if not isinstance(record, (AttemptRecord, LedgerRecord, PartRecord, WriteUserRecord)):
        return record
    user = users.get((record.vhost, record.token), "")
    token = own_id(user, record.token)
    if isinstance(record, PartRecord):
        return replace(record, token=token, branch=own_id(user, record.branch))
    if isinstance(record, LedgerRecord):
        branches = [[kind, target, own_id(user, name), rows] for kind, target, name, rows in record.branches]
        return replace(record, token=token, branches=branches)
    return replace(record, token=token)
