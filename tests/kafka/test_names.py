"""Names of topics and logs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.core.errors import OptionError
from broker_core.kafka import names
from broker_core.kafka.protocol.port import TopicPartition, parse_log

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=19)  # escaped, they always fit


@given(texts)
def test_an_app_topic_names_its_app(app_id: str) -> None:
    topic = names.app_topic(app_id)
    assert names.require_queue_name(topic.removeprefix(names.RESERVED)) and len(topic) <= names.LONGEST
    assert names.app_of(topic) == app_id and names.app_of(names.stage_topic(app_id)) is None


@given(texts, texts)
def test_topics_of_two_apps_differ_also_for_kafkas_metrics(one: str, other: str) -> None:
    """Kafka refuses a topic whose name equals another one's with ``_`` for ``.``."""
    if one != other:
        assert names.app_topic(one).replace(".", "_") != names.app_topic(other).replace(".", "_")


def test_a_topic_that_no_app_has_named_is_no_apps() -> None:
    for topic in (
        "orders",
        "_txmq.app.a_5",
        "_txmq.app.a_5F",
        "_txmq.app.a_61",
        "_txmq.app._ff",
        "_txmq.app.a.b",
    ):
        assert names.app_of(topic) is None


@pytest.mark.parametrize("app_id", ["", "a" * 238, "é" * 40])
def test_an_app_that_no_topic_can_be_named_after_is_refused(app_id: str) -> None:
    """Also where its name fits into one of its topics, and not into the other."""
    for topic in (names.app_topic, names.stage_topic):
        with pytest.raises(OptionError, match="appId"):
            topic(app_id)


def test_the_longest_app_id_has_both_topics() -> None:
    app_id = "a" * 237
    assert len(names.app_topic(app_id)) < len(names.stage_topic(app_id)) == names.LONGEST


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "ä", "a b", "x" * 250])
def test_a_queue_that_no_topic_can_be_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="is not a valid name of a Kafka topic"):
        names.require_queue_name(name)


def test_a_queue_with_a_name_of_ours_is_refused() -> None:
    assert names.require_queue_name("txmq.orders") == "txmq.orders"
    with pytest.raises(OptionError, match="as the topics of txmq do"):
        names.require_queue_name("_txmq.orders")


@given(st.from_regex(r"[a-zA-Z0-9._-]{1,249}", fullmatch=True), st.integers(0, 10**9 - 1))
def test_a_log_is_parsed_as_it_was_written(topic: str, partition: int) -> None:
    assert parse_log(str(TopicPartition(topic, partition))) == (topic, partition)


@pytest.mark.parametrize(
    "text", ["orders", "orders/", "/1", "orders/01", "orders/-1", "orders/1/2", "orders/٣", ""]
)
def test_what_is_no_log_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not a log of Kafka"):
        parse_log(text)


def test_a_producer_is_named_after_its_app() -> None:
    assert names.producer_of("é/1") == "txmq.é/1"
