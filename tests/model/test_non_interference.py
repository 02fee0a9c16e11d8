"""Who has no right to a thing changes nothing of it for those who have, and learns nothing of it, whatever
ids it knows, at every listener.

Random histories and any subset of rights, each with and without mallory's calls, and each with other secrets;
and each rule switched off once, which a history finds.
``TXMQ_SOAK_ROUNDS=n`` (or ``--soak-rounds n``) runs n times as many histories, from other seeds each time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from broker_core.broker import command_permissions as rules
from broker_core.broker.access.users import Users, transaction_key
from broker_core.broker.batch.owners import AppOwners
from broker_core.broker.topology.topology import Topology
from broker_core.broker.transaction import names
from broker_core.launcher import Broker
from broker_core.server.access import throttle
from broker_core.server.access.caller import Caller
from broker_core.server.flight.call_permissions import CallPermissions
from broker_core.server.flight.channels import FlightChannels
from broker_core.server.listener_options import ListenerOptions
from tests.model.grants import GRANTS, SUBSETS, Grant
from tests.model.interference import ATTACKS, HONEST, MALLORY, ROOT, Site

EXAMPLES = 15
SHARES = "shares queues"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    patched = pytest.MonkeyPatch()
    patched.setattr(throttle, "FIRST_S", 0.0)
    patched.setattr(throttle, "ADDRESS_S", 0.0)
    listeners = ListenerOptions(http=["127.0.0.1:0"])
    directory: Path = tmp_path_factory.mktemp("interference")
    with patched.context(), Broker.open(directory, amqp=["127.0.0.1:0"], listeners=listeners) as broker:
        yield Site(broker)
    patched.undo()


def difference(site: Site, steps: list[str], grant: Grant) -> list[Any]:
    """What the honest see otherwise because of mallory: (without, with) of each answer."""
    alone = site.run(steps, grant, alone=True)
    beside = site.run(steps, grant)
    return [pair for pair in zip(alone, beside, strict=True) if pair[0] != pair[1] and not _same(*pair)]


def _same(alone: object, beside: object) -> bool:
    """But for who it was, and for the identity of the virtual host of this history: its name, and how many commits
    there were before it.
    """
    first, second = (re.sub(", identity='[^']*'", "", repr(each)) for each in (alone, beside))
    return first.replace(f"'{ROOT}'", f"'{MALLORY}'") == second


STEPS = st.lists(st.one_of(st.sampled_from(HONEST), st.sampled_from(ATTACKS)), min_size=4, max_size=20)


def check(site: Site, examples: int, *, soak: bool) -> None:
    @settings(
        max_examples=examples,
        derandomize=not soak,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(STEPS, SUBSETS | st.sampled_from(list(GRANTS.values())))
    def histories(steps: list[str], grant: Grant) -> None:
        assert difference(site, steps, grant) == []

    histories()


def test_mallory_changes_nothing_that_others_see(site: Site) -> None:
    soak = int(os.environ.get("TXMQ_SOAK_ROUNDS", "0"))
    check(site, EXAMPLES * max(1, soak), soak=bool(soak))


EVERY = ["h_publish", "h_claim", "h_open", "h_stage", "h_write", "h_prepare", "h_hold", "h_token"]


@pytest.mark.parametrize("grant", GRANTS)
def test_every_attack_with_each_of_these_rights(site: Site, grant: str) -> None:
    """In the midst of what the honest do, which they end after it."""
    ends = ["h_commit", "h_apply", "h_commit_write", "h_decide", "h_end_held", "h_asks", "h_publish_private"]
    assert difference(site, [*EVERY, *ATTACKS, *ends], GRANTS[grant]) == []


@pytest.mark.soak
def test_soak_mallory_changes_nothing_that_others_see(site: Site, rounds: int) -> None:
    check(site, 40 * rounds, soak=True)


# who has one of the other tags sees names and numbers; who may read these queues, ann's messages
BLIND = [name for name, grant in GRANTS.items() if grant.tags in ((), ("impersonator",)) and name != SHARES]
BLIND_SUBSETS = st.builds(Grant._replace, SUBSETS, tags=st.sampled_from([(), ("impersonator",)])).filter(
    lambda grant: not any(grant.may("read", queue) for queue in ("in", "out", "secret"))
)


def told_apart(site: Site, steps: list[str], grant: Grant) -> list[Any]:
    """Where mallory is answered otherwise because of ann's secrets: (with one, with the other)."""
    one, other = (site.learnt(steps, grant, secret) for secret in (0, 1))
    return [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]]


def check_secrets(site: Site, examples: int, *, soak: bool) -> None:
    @settings(
        max_examples=examples,
        derandomize=not soak,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(STEPS, BLIND_SUBSETS | st.sampled_from([GRANTS[name] for name in BLIND]))
    def histories(steps: list[str], grant: Grant) -> None:
        assert told_apart(site, steps, grant) == []

    histories()


@pytest.mark.parametrize("grant", BLIND)
def test_a_refusal_is_the_same_whether_the_thing_is_there_or_not(site: Site, grant: str) -> None:
    steps = ["h_publish", "m_probes", "h_claim", "m_asks", "m_browses"]
    assert told_apart(site, steps, GRANTS[grant]) == []


def test_mallory_learns_nothing_of_what_others_have(site: Site) -> None:
    soak = int(os.environ.get("TXMQ_SOAK_ROUNDS", "0"))
    check_secrets(site, 5 * max(1, soak), soak=bool(soak))


@pytest.mark.soak
def test_soak_mallory_learns_nothing_of_what_others_have(site: Site, rounds: int) -> None:
    check_secrets(site, 15 * rounds, soak=True)


@pytest.mark.parametrize("rule", ["read_queue", "delete_queue", "publish"])
def test_a_permission_that_is_not_asked_tells_secrets_apart(
    site: Site, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, rule, _nothing)
    assert told_apart(site, ["m_probes"], GRANTS["enters"]) != []


@pytest.mark.parametrize("grant", ["enters", SHARES])
def test_ids_that_mallory_has_used_first_are_free_for_ann(site: Site, grant: str) -> None:
    """Tokens and branches are those of their user, whoever knows them."""
    for steps in (
        "m_squats h_write h_commit_write",
        "h_write m_squats h_commit_write h_write m_squats",
        f"{CLAIMED} m_squats h_open m_squats h_stage m_squats h_commit m_squats h_apply",
    ):
        assert difference(site, steps.split(), GRANTS[grant]) == []


def test_who_decides_needs_the_rights_to_what_is_decided_beside_the_ids(site: Site) -> None:
    """With the rights of all apps and writes, mallory still has none to their queues and exchanges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AppOwners, "same", lambda *_: True)
        _shares_ids(patch)
        assert difference(site, f"{CLAIMED} h_open m_steals h_commit".split(), GRANTS["enters"]) == []
        assert difference(site, ["h_write", "m_writes"], GRANTS["enters"]) == []


class Case(NamedTuple):
    """``off`` switches the rule off; after that, the history shows mallory's hand."""

    rule: str
    off: Callable[[pytest.MonkeyPatch], None]
    steps: str
    grant: str = "has names of its own"


def _takes(permits: CallPermissions, caller: Caller, *apps: str) -> None:
    owners = permits._batches(caller).owners
    for app in apps:
        permits._broker.run(lambda _state, change, _now, app=app: owners.take(change, caller.actor, app))


def _bare(vhost: str, user: str, name: str) -> str:
    return name if name.startswith("write@") else transaction_key(vhost, user, name)


def _of_all(vhost: str, user: str, name: str) -> str:
    return transaction_key(vhost, "", name)


def _nothing(*_args: object, **_named: object) -> None:
    return None


def _off(owner: object, name: str, instead: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, instead)


def _raw(_users: Users, _user: str, name: str) -> str:
    return name


def _shares_ids(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Users, "own_id", _raw)
    patch.setattr(AppOwners, "require_tokens", _nothing)


CLAIMED = "h_publish h_claim"
DECIDED = "h_open h_stage h_commit"
CASES = (
    Case(
        "an app belongs to its owner",
        _off(AppOwners, "require", _nothing),
        f"{DECIDED} m_applies h_apply",
        "enters",
    ),
    Case(
        "asking takes nothing", _off(CallPermissions, "use_app", _takes), "m_asks h_publish h_claim", "enters"
    ),
    Case(
        "a batch consumes what its owner's apps have read",
        _off(AppOwners, "same", lambda *_: True),
        f"{CLAIMED} h_open m_steals h_commit",
        SHARES,
    ),
    Case(
        "and nobody poisons it",
        _off(AppOwners, "same", lambda *_: True),
        f"m_poisons {CLAIMED} h_open h_commit",
    ),
    Case(
        "a token is that of its user: nobody takes it first",
        _off(Users, "own_id", _raw),
        "m_squats h_write h_commit_write",
    ),
    Case("and so is a branch", _off(Users, "own_id", _raw), "m_stages h_write h_commit_write"),
    Case("and one of a micro-batch", _off(Users, "own_id", _raw), "m_opens h_open h_stage h_commit"),
    Case(
        "a name is no key of the broker's own",
        _off(names, "transaction_key", _bare),
        "h_write m_names h_commit_write",
        "names transactions",
    ),
    Case(
        "a name is one of its user: nobody squats it",
        _off(names, "transaction_key", _of_all),
        "m_names h_asks h_token",
        "names transactions",
    ),
    Case(
        "a prepared transaction is decided by its user",
        _off(names, "transaction_key", _of_all),
        "h_prepare m_commits h_decide",
        "names transactions",
    ),
    Case(
        "the same over AMQP",
        _off(names, "transaction_key", _of_all),
        "h_prepare m_rolls_back h_decide",
        "names transactions",
    ),
    Case("a batch write belongs to its user", _shares_ids, "h_write m_drops h_commit_write", "enters"),
    Case("nobody commits it early", _shares_ids, "h_write m_writes h_see", SHARES),
    Case(
        "CC and BCC are asked for",
        _off(rules, "carbon_copies", lambda _properties: ((), b"")),
        "m_copies h_drain",
        "publishes in public",
    ),
    Case(
        "a channel belongs to who opened it",
        _off(FlightChannels, "own", lambda _self, _caller, channel_id: channel_id),
        "h_hold m_takes_channel h_end_held",
        "enters",
    ),
    Case(
        "who looks does not decide",
        _off(Caller, "operate", _nothing),
        f"{CLAIMED} m_releases h_claim",
        "looks",
    ),
    Case(
        "permissions are asked over HTTP",
        _off(rules, "delete_queue", _nothing),
        "h_publish m_asks_http h_see",
        "manages",
    ),
    Case(
        "a deleted virtual host is over",
        _off(Topology, "require_there", _nothing),
        "h_remake m_prepares_late h_see",
        "enters",
    ),
    Case("permissions are asked", _off(rules, "read_queue", _nothing), "h_publish m_browses", "enters"),
)


def test_each_rule_is_where_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a change lands; the soak then finds each."""
    for case in CASES:
        case.off(monkeypatch)
        monkeypatch.undo()


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_each_rule_switched_off_is_found(site: Site, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = case.steps.split()
    assert difference(site, steps, GRANTS[case.grant]) == []
    case.off(monkeypatch)
    try:
        assert difference(site, steps, GRANTS[case.grant]) != []
    finally:
        monkeypatch.undo()


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_soak_some_subset_of_rights_finds_each_rule_switched_off(
    site: Site, case: Case, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    steps = case.steps.split()
    case.off(monkeypatch)
    calm = settings(
        max_examples=2000,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        find(SUBSETS, lambda grant: difference(site, steps, grant) != [], settings=calm, random=Random(seed))
    finally:
        monkeypatch.undo()
