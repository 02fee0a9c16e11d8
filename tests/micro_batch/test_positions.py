from __future__ import annotations

from broker_core.micro_batch.positions import MOST, brief


def test_few_logs_are_shown_whole_and_of_many_the_first() -> None:
    assert brief({"b": 2, "a": [0, 1]}) == '{"a":[0,1],"b":2}'
    many = {f"t/{number:04}": number for number in range(1_000)}
    assert brief(many) == f"{brief(dict([*many.items()][:MOST]))[:-1]}, and 992 more}}"


def test_of_two_vectors_of_many_logs_those_that_differ_are_shown() -> None:
    old = {f"t/{number:04}": [0, number] for number in range(1_000)}
    new = {**old, "t/0700": [0, 7], "u/0": [0, 1]}
    assert brief(new, old) == '{"t/0700":[0,7],"u/0":[0,1]}'
    assert brief(old, new) == '{"t/0700":[0,700]}'
    assert brief(old, old) == brief(old)
