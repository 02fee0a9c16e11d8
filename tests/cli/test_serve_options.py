"""One table says what ``txmq serve`` takes: its arguments set what a broker is opened with."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import pytest

from broker_core.launcher import Broker
from broker_core.server.options import ServeOptions
from txmq import cli
from txmq.command.declare import Options
from txmq.serve import options_of
from txmq.serve_options import GENERAL, LIMITS, TLS, ServeOption

EVERY = (*GENERAL, *LIMITS, *TLS)
SETS = [option for option in EVERY if option.sets]
UNITS = {"thousand": 1_000, "million": 1_000_000, "MiB": 1 << 20, "GiB": 1 << 30}
CERTIFICATE = ["--tls-cert", "cert.pem", "--tls-key", "key.pem"]


def parsed(*words: str) -> Options:
    return cli.parsed(["serve", "--data", "d", *words])


def named(option: ServeOption) -> str | None:
    """The default that a text names; None: no number and no word of an option."""
    found = re.search(r"default(?: and at most)?:? ([^;]+)$", option.text)
    return None if found is None else found[1]


@pytest.mark.parametrize("option", SETS, ids=lambda option: option.flag)
def test_a_text_names_the_default_of_the_field(option: ServeOption) -> None:
    options = options_of(parsed(*CERTIFICATE))
    for path in option.sets.split():
        default, text = attrgetter(path)(options), named(option)
        if not option.value:
            assert default is False and text is None
        elif default in (None, "", [], ()):
            assert text is None or not text[:1].isdigit(), "the field has no default"
        elif isinstance(default, str):
            assert text == default
        else:
            assert text is not None
            number, _, unit = text.partition(" ")
            hours = 3600 if option.value == "HOURS" else 1
            assert float(number) * UNITS.get(unit, 1) * hours == default


@pytest.mark.parametrize("option", SETS, ids=lambda option: option.flag)
def test_an_option_sets_its_fields_and_no_other(option: ServeOption) -> None:
    value = {"HOST:PORT": "127.0.0.1:1", "FILE": "f", "PART": "0.5", "TLS_LOGIN_FROM": "common_name"}.get(
        option.value, "5000"
    )
    value = "500000000" if option.flag == "connection-bytes" else value
    words = [f"--{option.flag}", *([value] if option.value else [])]
    before, after = options_of(parsed(*CERTIFICATE)), options_of(parsed(*CERTIFICATE, *words))
    set_here = option.sets.split()
    every = {path for other in SETS for path in other.sets.split()}
    assert {path for path in every if attrgetter(path)(before) != attrgetter(path)(after)} == set(set_here)
    expected = (
        getattr(option.parse, "convert", lambda given, *_: option.parse(given))(value, None, None)
        if option.value
        else True
    )
    for path in set_here:
        assert attrgetter(path)(after) in (expected, [expected])


NUMBERS = [option for option in EVERY if option.value in ("N", "PART", "SECONDS", "HOURS", "BYTES")]
SENSELESS = ("inf", "-inf", "nan", "-1", "-0.5", "1e300", "9" * 30, "", "x", "0x10")


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.flag)
@pytest.mark.parametrize("value", SENSELESS)
def test_a_number_that_makes_no_sense_is_one_error(
    option: ServeOption, value: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--data", str(tmp_path / "d"), f"--{option.flag}={value}"])
    assert ended.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert f"--{option.flag}" in told[-1] and not (tmp_path / "d").exists()


def test_every_number_is_meant() -> None:
    assert len(NUMBERS) > 20
    others = {option.value for option in EVERY if option not in NUMBERS}
    assert others == {"", "DIR", "HOST:PORT", "FILE", "LOG_FORMAT", "TLS_LOGIN_FROM", "HANDLER", "KEY=VALUE"}


def test_nothing_given_is_what_a_broker_is_opened_with() -> None:
    given, plain = options_of(parsed("--amqp", "none")), ServeOptions()
    differs = [each.name for each in fields(given) if getattr(given, each.name) != getattr(plain, each.name)]
    assert differs == ["port"]
    assert (given.port, list(given.handlers)) == (5673, [])


def test_the_parameters_of_open_are_these_options() -> None:
    names = [
        name for name in inspect.signature(Broker.open).parameters if name not in ("directory", "started")
    ]
    assert names == [field.name for field in fields(ServeOptions)]
