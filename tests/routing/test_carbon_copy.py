from __future__ import annotations

import pytest

from broker_core.core.errors import PreconditionFailed
from broker_core.message.properties import Properties
from broker_core.routing.carbon_copy import MAX_COPIES, carbon_copies, has_copies


def test_cc_and_bcc_name_more_keys_and_bcc_is_taken_out() -> None:
    properties = Properties(headers={"CC": ["a", "b"], "BCC": ["c"], "kept": 1}, message_id="m")
    keys, delivered = carbon_copies(properties.encode())
    assert keys == ["a", "b", "c"]
    assert Properties.decode(delivered) == Properties(headers={"CC": ["a", "b"], "kept": 1}, message_id="m")


def test_a_message_without_copies_keeps_its_bytes() -> None:
    for properties in (
        Properties(),
        Properties(content_type="CC"),
        Properties(headers={"Cc": ["a"]}),
        Properties(headers={"x": "\x02CC"}),
    ):
        encoded = properties.encode()
        assert carbon_copies(encoded) == ([], encoded)
    assert not has_copies(b"")


@pytest.mark.parametrize(("value", "type_name"), [("a", "longstr"), (1, "signedint"), ({"a": 1}, "table")])
def test_a_header_that_is_no_list_of_keys_is_refused(value: object, type_name: str) -> None:
    with pytest.raises(PreconditionFailed) as refused:
        carbon_copies(Properties(headers={"BCC": value}).encode())
    assert refused.value.summary == f'invalid message: {{unacceptable_type_in_header,"BCC",{type_name}}}'


def test_what_is_no_text_in_a_list_is_no_key() -> None:
    assert carbon_copies(Properties(headers={"CC": [1, "a", None]}).encode())[0] == ["a"]


def test_as_many_and_as_long_keys_are_taken_as_can_be_routed_in_one_piece() -> None:
    half = MAX_COPIES // 2
    most = {"CC": ["k" * 255] * half, "BCC": ["\u00e4" * 127] * half}
    assert len(carbon_copies(Properties(headers=most).encode())[0]) == MAX_COPIES
    for headers, found in (
        ({"CC": ["k"] * half, "BCC": ["k"] * (half + 1)}, f"{MAX_COPIES + 1} routing keys"),
        ({"CC": ["k" * 256]}, "has 256 bytes"),
        ({"BCC": ["\u00e4" * 128]}, "has 256 bytes"),
    ):
        with pytest.raises(PreconditionFailed, match=found):
            carbon_copies(Properties(headers=headers).encode())
