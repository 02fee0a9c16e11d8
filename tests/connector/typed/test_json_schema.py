"""JSON Schema: what is not valid has a reason of bounded length, and no schema opens a connection or hangs silently."""

from __future__ import annotations

import json
import re
import socket
import threading
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.core.errors import OptionError
from connector.typed import json_schema as module
from connector.typed.decode_udf import UnsupportedSchema
from connector.typed.json_schema import checker, encoder, fault_of, validator
from connector.typed.registry.client import RegisteredSchema
from tests.gates import examples

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "lines": {"type": "array", "items": {"type": "object", "required": ["sku"]}, "maxItems": 2},
        "state": {"enum": ["new", "paid"]},
    },
    "required": ["id"],
    "additionalProperties": False,
}


def schema(value: Any, **named: Any) -> RegisteredSchema:
    """``named``: what it refers to, with a dot for each underscore of the name."""
    given = tuple(
        (name.replace("_", "."), each if isinstance(each, str) else json.dumps(each))
        for name, each in named.items()
    )
    text = value if isinstance(value, str) else json.dumps(value)
    return RegisteredSchema("JSON", (*(text for _, text in given), text), given)


def fault(value: Any, body: Any, **named: Any) -> str | None:
    made = validator(schema(value, **named))
    return fault_of(made, body if isinstance(body, bytes) else json.dumps(body).encode(), "schema id 1")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"id": 1}, None),
        ({"id": 1.0, "lines": [], "state": "new"}, None),
        ({}, "the body is not valid at $: required ('id' is a required property)"),
        ({"id": 0}, "the body is not valid at $.id: minimum (0 is less than the minimum of 1)"),
        ({"id": "a"}, "the body is not valid at $.id: type ('a' is not of type 'integer')"),
        ({"id": True}, "the body is not valid at $.id: type (True is not of type 'integer')"),
        ({"id": 1, "lines": [{"sku": 1}, {}]}, "the body is not valid at $.lines[1]: required ('sku' is a required property)"),
        ({"id": 1, "more": 1}, "the body is not valid at $: additionalProperties (Additional properties are not allowed ('more' was unexpected))"),
        ({"id": 1, "state": "gone"}, "the body is not valid at $.state: enum ('gone' is not one of ['new', 'paid'])"),
        ([], "the body is not valid at $: type ([] is not of type 'object')"),
        (b"{", "the body is not JSON (JSONDecodeError"),
        (b"", "the body is not JSON (JSONDecodeError"),
        (b'{"id": 1} x', "the body is not JSON (JSONDecodeError: Extra data"),
        (b'{"id": NaN}', "the body is not JSON (ValueError: NaN is not a JSON number)"),
        (b'{"id": -Infinity}', "the body is not JSON (ValueError"),
        (b"{'id': 1}", "the body is not JSON (JSONDecodeError"),
        (b"\xff\xfe{\0}\0", "the body is not JSON (UnicodeDecodeError"),
        (b'\xef\xbb\xbf{"id": 1}', "the body is not JSON (JSONDecodeError"),
        (b'{"id": ' + b"9" * 5_000 + b"}", "the body is not JSON (ValueError"),
        (b"[" * 100_000, "the body is nested too deeply"),
    ],
)  # fmt: skip
def test_a_body_is_valid_or_the_first_keyword_is_told(body: Any, reason: str | None) -> None:
    found = fault(ORDER, body)
    assert found is None if reason is None else str(found).startswith(reason), found


def test_a_reason_is_short_whatever_the_body() -> None:
    long = "x" * 10_000
    for value, body in (
        ({"additionalProperties": {"type": "integer"}}, {long: "a"}),
        ({"type": "integer"}, long),
        ({"required": [long]}, {}),
        ({"enum": [long]}, 1),
        ({"pattern": long}, "y"),
    ):
        assert 0 < len(str(fault(value, body))) < 330


def test_a_reason_can_be_stored_whatever_the_characters() -> None:
    for value, body in (
        ({"additionalProperties": {"type": "integer"}}, b'{"\\ud800": "\\udfff"}'),
        ({"required": ["\ud800"]}, b"{}"),
        ({"$ref": "\ud800"}, b"1"),
        ({"pattern": "\ud800"}, b'"\\udc00"'),
    ):
        found = fault(value, body)
        assert found is not None and pa.array([found], pa.string()).to_pylist() == [found]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=2),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(["id", "lines", "sku", "state"]), each, max_size=3),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.slow
@given(JSON)
@examples(150)
def test_what_the_library_accepts_is_valid_and_nothing_else(value: Any) -> None:
    accepted = jsonschema.Draft7Validator(ORDER).is_valid(value)
    assert (fault(ORDER, value) is None) == accepted


@given(st.binary(max_size=20))
def test_any_bytes_are_judged(body: bytes) -> None:
    found = fault({"type": "object"}, body)
    assert found is None or found.startswith("the body is not ")


@pytest.mark.parametrize(
    ("draft", "tuples"),
    [
        ("http://json-schema.org/draft-04/schema#", "items"),
        ("http://json-schema.org/draft-06/schema#", "items"),
        ("http://json-schema.org/draft-07/schema", "items"),
        ("https://json-schema.org/draft/2019-09/schema", "items"),
        ("https://json-schema.org/draft/2020-12/schema", "prefixItems"),
        (None, "items"),
    ],
)
def test_a_schema_names_its_draft(draft: str | None, tuples: str) -> None:
    value: dict[str, Any] = {tuples: [{"type": "integer"}], **({"$schema": draft} if draft else {})}
    assert fault(value, [1]) is None and "at $[0]: type" in str(fault(value, ["a"]))


def test_references_are_those_of_the_registry() -> None:
    line = {"type": "object", "required": ["sku"], "properties": {"sku": {"$ref": "#/definitions/sku"}}, "definitions": {"sku": {"type": "string"}}}  # fmt: skip
    for value in (
        {"items": {"$ref": "line.json"}},
        {"$id": "http://shop/order.json", "items": {"$ref": "line.json"}},
        {"$id": "http://shop/order.json", "items": {"$ref": "http://shop/line.json"}},
    ):
        assert fault(value, [{"sku": "a"}], line_json=line) is None
        assert "at $[1].sku: type" in str(fault(value, [{"sku": "a"}, {"sku": 1}], line_json=line))
    own = {"$id": "http://other/line.json", **line}
    assert "required" in str(fault({"items": {"$ref": "http://other/line.json"}}, [{}], x_json=own))
    through = {"items": {"$ref": "middle.json"}}
    assert "required" in str(fault(through, [{}], line_json=line, middle_json={"$ref": "line.json"}))
    newer = {"$schema": "https://json-schema.org/draft/2020-12/schema", "prefixItems": [{"type": "string"}]}
    assert "at $[0][0]: type" in str(fault({"items": {"$ref": "new.json"}}, [[1]], new_json=newer))
    assert fault({"$ref": "http://json-schema.org/draft-07/schema#"}, {"type": "object"}) is None


def test_a_remote_reference_causes_no_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        for each in (url, "file:///etc/passwd", "other.json", "#/definitions/none", "http://[bad"):
            value = {"properties": {"a": {"$ref": each}, "b": {"$schema": url}}}
            assert fault(value, {"b": 1}) is None
            assert fault(value, {"a": 1}) is not None
        found = fault({"$ref": url}, 1)
        assert found == f"schema id 1 refers to {url!r}, which the registry does not have"
        for each in (schema({"$schema": url}), schema({}, x={"$schema": url})):
            with pytest.raises(UnsupportedSchema, match="is not a draft of JSON Schema"):
                validator(each)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{", "is not a JSON Schema (JSONDecodeError"),
        ("", "is not a JSON Schema (JSONDecodeError"),
        ("5", "is not a JSON Schema (at $: 5 is not of type 'object', 'boolean'"),
        ("[" * 100_000, "is not a JSON Schema (RecursionError"),
        ('{"minimum": NaN}', "is not a JSON Schema (ValueError"),
        ({"type": "int"}, "is not a JSON Schema (at $.type: 'int'"),
        ({"pattern": "("}, "is not a JSON Schema (at $.pattern: '(' is not a 'regex'"),
        ({"properties": 5}, "is not a JSON Schema (at $.properties"),
        ({"$schema": 5}, "has the $schema '5', which is not a draft"),
        ({"$schema": "https://json-schema.org/draft/2099-01/schema"}, "which is not a draft of JSON Schema"),
    ],
)
def test_what_is_no_schema_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(UnsupportedSchema, match=re.escape(reason)):
        validator(schema(value))
    with pytest.raises(UnsupportedSchema):
        validator(schema({}, x=value))


def test_true_and_false_are_schemas() -> None:
    assert fault("true", 1) is None
    assert fault({"$id": "http://[bad", "$ref": "other.json"}, 1) is not None
    assert fault("false", 1) == "the body is not valid at $: false (False schema does not allow 1)"


def test_a_schema_that_refers_to_itself_without_an_end_is_a_fault() -> None:
    endless = "refers to itself without an end"
    assert endless in str(fault({"$ref": "#"}, {}))
    assert endless in str(fault({"$ref": "a"}, 1, a={"$ref": "b"}, b={"$ref": "a"}))
    tree = {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    deep: Any = {}
    for _ in range(20):
        deep = {"next": deep}
    assert fault(tree, deep) is None
    assert "$.next.next: additionalProperties" in str(fault(tree, {"next": {"next": {"x": 1}}}))


def test_what_takes_too_long_is_one_clear_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is not broken for it: another execution might be quicker."""
    monkeypatch.setattr(module, "LONGEST_S", 0.05)
    doubled: dict[str, Any] = {
        f"d{at}": {"allOf": [{"$ref": f"#/definitions/d{at + 1}"}] * 2} for at in range(40)
    }
    for value, body in (
        ({"pattern": "^(a+)+$"}, "a" * 60 + "!"),
        ({"$ref": "#/definitions/d0", "definitions": {**doubled, "d40": {}}}, 1),
    ):
        with pytest.raises(OptionError, match="is validated against schema id 1 for more than") as raised:
            fault(value, body)
        assert "nothing is decided" in str(raised.value)
    assert fault({"pattern": "a"}, "a") is None


def test_a_thread_has_no_limit_and_judges_alike() -> None:
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.extend([fault(ORDER, {"id": 1}), fault(ORDER, {})]))
    thread.start()
    thread.join()
    assert found == [None, "the body is not valid at $: required ('id' is a required property)"]


def test_each_body_is_judged_by_the_schema_of_its_id() -> None:
    check = checker({1: schema(ORDER), 2: schema("true")})
    bodies = [b'{"id": 1}', b"{}", b"{}", b"x", None, b"{}"]
    found = check(pa.array([1, 1, 2, 2, 1, 3], pa.int32()), pa.array(bodies, pa.binary())).to_pylist()
    assert found[0] is found[2] is found[4] is found[5] is None
    assert found[1].startswith("the body is not valid at $: required") and "is not JSON" in found[3]


def test_a_row_that_is_not_valid_is_not_encoded() -> None:
    encode = encoder(b"\0\0\0\0\7", schema(ORDER))
    assert encode(pa.array(['{"id":1}'])).to_pylist() == [b'\0\0\0\0\7{"id":1}']
    with pytest.raises(
        OptionError, match=r"a row does not fit the JSON Schema: the body is not valid at \$\.id: minimum"
    ):
        encode(pa.array(['{"id":1}', '{"id":0}']))
