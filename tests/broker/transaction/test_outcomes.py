"""Was it committed? Outcomes are kept by number and by age; what may have been forgotten is unknown, and
never "no".
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker_core.broker.broker import BrokerState
from broker_core.broker.transaction.outcomes import OutcomeLimits
from broker_core.core import errors
from broker_core.core.change import Change
from broker_core.core.records import ChannelCommitRecord, ForgottenRecord, OutcomeRecord
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore
from tests.broker.conftest import Clock

KEPT = OutcomeLimits(count=20, age_s=3600)


class Asked:
    """A broker that keeps few outcomes, and its successors after restarts."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        self.broker = LocalBroker(self.store, self.clock, outcomes=KEPT, upkeep=False)
        with self.broker.channel() as channel:
            channel.queue_declare("q")

    def restart(self) -> None:
        store = self.store.reopened()
        self.broker.close()
        self.store = store
        self.broker = LocalBroker(store, self.clock, outcomes=KEPT, upkeep=False)

    def commit(self, *tokens: str) -> None:
        with self.broker.channel() as channel:
            channel.tx_select()
            for token in tokens:
                channel.publish(b"x", routing_key="q")
                channel.tx_commit(token)

    @property
    def now_s(self) -> float:
        return self.clock.now_us / 1_000_000


@pytest.fixture
def asked() -> Iterator[Asked]:
    found = Asked()
    yield found
    found.broker.close()


def test_a_token_that_nobody_used_is_answered_no_while_nothing_is_forgotten(asked: Asked) -> None:
    asked.commit("t1")
    assert asked.broker.committed("t1") and not asked.broker.committed("t2")


def test_an_outcome_that_others_have_pushed_out_is_unknown_and_never_no(asked: Asked) -> None:
    asked.commit("mine", *(f"t{number}" for number in range(100)))
    for _ in range(2):
        assert len(asked.broker.state.names.outcomes) < 2 * KEPT.count
        assert asked.broker.committed("t99")
        with pytest.raises(errors.UnknownOutcome, match="mine"):
            asked.broker.committed("mine")
        with pytest.raises(errors.UnknownOutcome):
            asked.broker.commit("mine")
        with pytest.raises(errors.UnknownOutcome):
            asked.broker.rollback("mine")
        asked.restart()


def test_an_outcome_is_kept_for_its_time_and_what_is_older_is_unknown(asked: Asked) -> None:
    asked.commit("mine")
    asked.clock.advance(3500)
    asked.commit("t1")
    assert asked.broker.committed("mine")
    asked.clock.advance(3600)
    asked.commit("t2")
    with pytest.raises(errors.UnknownOutcome):
        asked.broker.committed("mine")
    assert asked.broker.committed("t1") and asked.broker.committed("t2")


def test_who_says_since_when_gets_a_no_that_is_proved(asked: Asked) -> None:
    asked.commit(*(f"t{number}" for number in range(100)))
    asked.clock.advance(1)
    began = asked.now_s
    with pytest.raises(errors.UnknownOutcome):
        asked.broker.committed("mine")
    assert not asked.broker.committed("mine", since=began)
    asked.commit("mine")
    assert asked.broker.committed("mine", since=began)
    asked.commit(*(f"u{number}" for number in range(100)))
    with pytest.raises(errors.UnknownOutcome):
        asked.broker.committed("mine", since=began)


def test_prepared_and_rolled_back_are_answered_likewise(asked: Asked) -> None:
    with asked.broker.channel() as channel:
        channel.tx_select()
        channel.publish(b"x", routing_key="q")
        channel.prepare("xa")
        channel.publish(b"x", routing_key="q")
        channel.prepare("xb")
    asked.broker.rollback("xb")
    assert (asked.broker.outcome("xa"), asked.broker.outcome("xb")) == ("prepared", "rolled_back")
    asked.commit(*(f"t{number}" for number in range(100)))
    assert asked.broker.outcome("xa") == "prepared"
    with pytest.raises(errors.UnknownOutcome):
        asked.broker.outcome("xb")


def test_a_token_is_refused_a_second_time_as_long_as_its_outcome_is_kept(asked: Asked) -> None:
    asked.commit("mine", *(f"t{number}" for number in range(KEPT.count - 1)))
    with pytest.raises(errors.TransactionState, match="mine"):
        asked.commit("mine")


def call(broker: LocalBroker, channel: str, number: int) -> None:
    broker.run(lambda state, change, now: state.names.outcomes.remember_call(change, channel, number, now))


def took_place(broker: LocalBroker, channel: str, number: int, since_us: int) -> bool:
    return broker.run(
        lambda state, _change, _now: state.names.outcomes.call_took_place(channel, number, since_us)
    )


def test_commits_of_channels_take_no_places_among_names_and_one_record_each(asked: Asked) -> None:
    asked.commit("mine")
    opened_us = asked.clock.now_us
    for number in range(1, 200):
        call(asked.broker, "c1", number)
    for _ in range(2):
        assert asked.broker.committed("mine") and not asked.broker.committed("other")
        assert took_place(asked.broker, "c1", 199, opened_us) and not took_place(
            asked.broker, "c1", 200, opened_us
        )
        assert not took_place(asked.broker, "c2", 1, opened_us)
        assert len(asked.broker.state.names.outcomes.channels) == 1
        asked.restart()


def test_the_commit_of_a_channel_that_is_forgotten_is_unknown_to_who_opened_before(asked: Asked) -> None:
    opened_us = asked.clock.now_us
    call(asked.broker, "mine", 1)
    for number in range(100):
        asked.clock.advance(1)
        call(asked.broker, f"c{number}", 1)
    for _ in range(2):
        with pytest.raises(errors.UnknownOutcome):
            took_place(asked.broker, "mine", 1, opened_us)
        assert took_place(asked.broker, "c99", 1, opened_us)
        assert not took_place(asked.broker, "new", 1, asked.clock.now_us)
        asked.restart()


def test_a_work_that_fails_forgets_nothing(asked: Asked) -> None:
    asked.commit(*(f"t{number}" for number in range(2 * KEPT.count - 1)))
    before = (
        list(asked.broker.state.names.outcomes.items()),
        dict(asked.broker.state.names.outcomes.horizons),
    )

    def failing(state: BrokerState, change: Change, now: int) -> None:
        state.names.outcomes.remember(change, OutcomeRecord("one more", "committed", now))
        state.names.outcomes.remember_call(change, "c", 1, now)
        assert (
            "t0" not in state.names.outcomes
            and ForgottenRecord in map(type, change.puts)
            and ChannelCommitRecord in map(type, change.puts)
        )
        raise errors.PreconditionFailed("no")

    with pytest.raises(errors.PreconditionFailed):
        asked.broker.run(failing)
    assert (
        list(asked.broker.state.names.outcomes.items()),
        dict(asked.broker.state.names.outcomes.horizons),
    ) == before
    assert not asked.broker.state.names.outcomes.channels


def test_how_many_are_kept_is_at_least_one() -> None:
    for wrong in ((0, 1.0), (1, 0.0), (-1, 1.0)):
        with pytest.raises(errors.OptionError, match="at least 1"):
            OutcomeLimits(*wrong)
