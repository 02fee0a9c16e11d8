"""A SASL response is a user and a password, or one error that tells neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.amqp.v0_9_1.sasl import amqplain, plain
from broker_core.core.errors import MethodSyntaxError
from broker_core.message.field_table import encode_table

WITHOUT_ZERO = st.text(max_size=30).filter(lambda text: "\0" not in text)


@given(WITHOUT_ZERO, WITHOUT_ZERO)
def test_plain_gives_user_and_password(user: str, password: str):
    assert plain(f"\0{user}\0{password}".encode()) == (user, password)


@given(st.text(max_size=30), st.text(max_size=30))
def test_amqplain_gives_user_and_password_in_either_order(user: str, password: str):
    assert amqplain(encode_table({"LOGIN": user, "PASSWORD": password})[4:]) == (user, password)
    assert amqplain(encode_table({"PASSWORD": password, "more": 1, "LOGIN": user})[4:]) == (user, password)


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"guest",
        b"\0guest",
        b"guest\0guest",
        b"other\0guest\0guest",
        b"\0guest\0guest\0",
        b"\0\xff\0secret",
        b"\0user\0\xffsecret",
    ],
)
def test_a_damaged_plain_response_is_refused_without_telling_the_password(response: bytes):
    with pytest.raises(MethodSyntaxError) as raised:
        plain(response)
    assert "secret" not in str(raised.value)
    assert "guest" not in str(raised.value)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (b"nonsense", "AMQPLAIN response invalid"),
        (b"", "missing LOGIN or PASSWORD"),
        (encode_table({"LOGIN": "secret"})[4:], "missing LOGIN or PASSWORD"),
        (encode_table({"LOGIN": "secret", "PASSWORD": 1})[4:], "unsupported type for PASSWORD"),
        (encode_table({"LOGIN": b"\xffsecret", "PASSWORD": "secret"})[4:], "AMQPLAIN LOGIN is not UTF-8"),
    ],
)
def test_a_damaged_amqplain_response_is_refused_without_telling_the_password(response: bytes, text: str):
    with pytest.raises(MethodSyntaxError) as raised:
        amqplain(response)
    assert text in str(raised.value)
    assert "secret" not in str(raised.value)


@given(st.binary(max_size=60))
def test_any_response_gives_two_texts_or_one_error(response: bytes):
    for mechanism in (plain, amqplain):
        try:
            user, password = mechanism(response)
        except MethodSyntaxError:
            continue
        assert isinstance(user, str)
        assert isinstance(password, str)
