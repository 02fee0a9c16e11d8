"""``txmq serve --handler``: a handler without a launcher, from a module or an installed package; a bad value is one
error that says what to do, and doing it helps.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from bench.broker import serve_command
from broker_core.core.errors import OptionError
from broker_core.server.amqp.handlers.load import GROUP, load
from tests.progress import GUARD_S
from txmq import cli

SIZES = '''
from __future__ import annotations
from typing import TYPE_CHECKING, Annotated, Optional, Union
from broker_core.core.errors import PreconditionFailed
from broker_core.server.amqp.handlers.handler import Handler

class Sizes(Handler):
    def __init__(self, most: int, *, strict: bool = False, share: float | None = None, text="", rate=1.5,
                 least: Optional[int] = None):
        if most < 0:
            raise ValueError("most is below 0")
        self.given = most, strict, share, text, rate, least

    def content_in(self, session, header):
        if header.size > self.given[0]:
            raise PreconditionFailed(f"more than {self.given[0]} bytes")
        return header

if TYPE_CHECKING:
    from nowhere import Unknown

Count = int

class Typed(Handler):
    """Types that are the same as plain ones, and one that no name says at runtime."""

    def __init__(self, alias: Count = 0, union: Union[None, int] = None, late: Optional["float"] = None,
                 note: Annotated[bool, "a flag"] = False, first: None | int = None, several: int | str = "",
                 unknown: Unknown = None):
        self.given = alias, union, late, note, first, several, unknown

class Plain(Handler):
    """It has no constructor."""

class Other(Handler):
    def __init__(self, most: str):
        self.most = most

NO_CLASS = 1
'''


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules, and of installed packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sizes.py").write_text(SIZES)
    (folder / "ends.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "damaged.py").write_text("def (:\n")
    package(folder, "one", "sizes = sizes:Sizes\nplain = sizes:Plain\ntwice = sizes:Sizes\n")
    package(folder, "two", "twice = sizes:Plain\n")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("sizes", "ends", "damaged"):
        sys.modules.pop(name, None)


def package(folder: Path, name: str, points: str) -> None:
    """As pip leaves it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")


def given(names: Sequence[str], *options: str) -> list[Any]:
    return [getattr(each, "given", getattr(each, "most", None)) for each in load(names, options)]


@pytest.mark.parametrize("name", ["sizes:Sizes", "sizes"])
def test_options_come_as_the_constructor_says(modules: Path, name: str) -> None:
    assert given([name], "most=3") == [(3, False, None, "", 1.5, None)]
    options = "most=3", "strict=true", "share=0.5", "text=a=b", "rate=2", "least=7"
    assert given([name], *options) == [(3, True, 0.5, "a=b", 2.0, 7)]
    assert given([name], "most=3", "most=4", "text=") == [(4, False, None, "", 1.5, None)]


def test_a_type_is_what_the_annotation_means_and_not_how_it_is_written(modules: Path) -> None:
    names = "alias", "union", "late", "first", "several", "unknown"
    found = given(["sizes:Typed"], "note=true", *(f"{name}=3" for name in names))
    assert found == [(3, 3, 3.0, True, 3, "3", "3")]
    with pytest.raises(OptionError, match="give a whole number"):
        load(["sizes:Typed"], ["alias=x"])


def test_an_option_is_for_each_handler_that_takes_it_or_for_one_by_name(modules: Path) -> None:
    names = "sizes:Sizes", "plain", "sizes:Other"
    assert given(names, "most=3") == [(3, False, None, "", 1.5, None), None, "3"]
    assert given(names, "sizes:Sizes.most=3", "sizes:Other.most=4", "text=t")[::2] == [
        (3, False, None, "t", 1.5, None),
        "4",
    ]


def test_no_handler_is_none() -> None:
    assert load((), ()) == ()


# name, options -> what is wrong, what to do
WRONG: list[tuple[str, tuple[str, ...], str, str]] = [
    ("size", (), "no installed packages have a handler 'size'", "give MODULE:CLASS, or another one that is installed: "),
    ("twice", (), "several installed packages have a handler 'twice'", "give MODULE:CLASS"),
    ("missing:X", (), "handler 'missing:X' cannot be loaded: ModuleNotFoundError", "`python -c 'import missing'` must work"),
    ("damaged:X", (), "cannot be loaded: SyntaxError", "`python -c 'import damaged'` must work"),
    ("ends:X", (), "cannot be loaded: SystemExit: 3", "`python -c 'import ends'` must work"),
    ("sizes:X", (), "cannot be loaded: AttributeError", "the class derive from Handler"),
    ("sizes:NO_CLASS", (), "cannot be loaded: TypeError", "the class derive from Handler"),
    ("sizes:", (), "cannot be loaded: TypeError", "the class derive from Handler"),
    ("sizes:Handler.session_in", (), "cannot be loaded: TypeError", "the class derive from Handler"),
    (":", (), "cannot be loaded: ", "the class derive from Handler"),
    ("sizes:Sizes", (), "handler 'sizes:Sizes' cannot be made: TypeError", "sizes:Sizes takes most, strict, share"),
    ("sizes:Sizes", ("most=-1",), "cannot be made: ValueError: most is below 0", "change its --handler-option KEY=VALUE"),
    ("sizes:Sizes", ("most=x",), "--handler-option 'most=x' has a wrong value", "give a whole number"),
    ("sizes:Sizes", ("most=1", "strict=yes"), "'strict=yes' has a wrong value", "give true or false"),
    ("sizes:Sizes", ("most=1", "rate=fast"), "'rate=fast' has a wrong value", "give a number"),
    ("sizes:Sizes", ("most",), "no handler takes --handler-option 'most'", "write KEY=VALUE; sizes:Sizes takes most"),
    ("sizes:Sizes", ("most=1", "self=1"), "no handler takes --handler-option 'self=1'", "takes most, strict"),
    ("sizes:Sizes", ("plain.most=1",), "no handler takes --handler-option 'plain.most=1'", "takes most, strict"),
    ("plain", ("most=1",), "no handler takes --handler-option 'most=1'", "plain takes none"),
    ("", ("most=1",), "no handler takes --handler-option 'most=1'", "name one with --handler"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "what", "do"), WRONG)
def test_a_wrong_one_is_one_error(
    modules: Path, name: str, options: Sequence[str], what: str, do: str
) -> None:
    with pytest.raises(OptionError) as raised:
        load([name] if name else [], options)
    assert what in raised.value.summary and do in str(raised.value)


def test_who_does_what_the_errors_say_arrives_at_a_handler(modules: Path, tmp_path: Path) -> None:
    """On a command line, from a program in a folder of its own."""
    with pytest.raises(Refused, match=r"module 'sizes'|No module named 'sizes'.*see PYTHONPATH"):
        Serve(tmp_path, "sizes:Sizes")
    with pytest.raises(Refused, match="takes most, strict"):
        Serve(tmp_path, "sizes:Sizes", path=modules)
    with pytest.raises(Refused, match="give a whole number"):
        Serve(tmp_path, "sizes:Sizes", "most=1k", path=modules)
    with pytest.raises(
        Refused, match="give MODULE:CLASS, or another one that is installed: plain, sizes, twice"
    ):
        Serve(tmp_path, "size", "most=1000", path=modules)
    with pytest.raises(Refused, match=r"--handler needs an AMQP listener.*leave out --amqp none"):
        Serve(tmp_path, "sizes:Sizes", "most=1000", path=modules, amqp="none")
    assert not (tmp_path / "data").exists()
    for name in ("sizes:Sizes", "sizes"):
        with contextlib.closing(Serve(tmp_path, name, "most=1000", path=modules)) as served:
            with contextlib.closing(pika.BlockingConnection(pika.URLParameters(served.url))) as connection:
                channel = connection.channel()
                channel.queue_declare("q", exclusive=True)
                channel.basic_publish("", "q", bytes(1000))
                assert channel.basic_get("q", auto_ack=True)[2] == bytes(1000)
                with pytest.raises(ChannelClosedByBroker, match="more than 1000 bytes"):
                    refused(channel)


def refused(channel: Any) -> None:
    channel.basic_publish("", "q", bytes(1001))
    channel.queue_declare("q", passive=True)


class Refused(Exception):
    """What ``txmq serve`` says when it does not start."""


class Serve:
    """``txmq serve --handler NAME`` as a user runs it. Raises Refused."""

    def __init__(
        self, folder: Path, name: str, *options: str, path: Path | None = None, amqp: str = "127.0.0.1:0"
    ) -> None:
        root = Path(__file__).parents[3]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [root, *([path] if path else [])])),
        }
        more = [word for option in options for word in ("--handler-option", option)]
        self._process = subprocess.Popen(
            serve_command(folder / "data", "--amqp", amqp, "--handler", name, *more),
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        ready = self._process.stdout.readline().split()
        if not ready:
            said = self._process.stderr.read()
            self.close()
            assert (
                self._process.returncode == (2 if "--handler needs" in said else 1) and said.count("\n") == 1
            ), said
            raise Refused(said)
        self.url = ready[2].replace("amqp://", "amqp://guest:guest@")

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=GUARD_S)


def test_the_command_of_the_page_names_a_handler_with_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    words = re.search(r"^PYTHONPATH=(\w+) txmq (.*)$", (root / "docs" / "handlers.md").read_text(), re.M)
    assert words is not None
    monkeypatch.syspath_prepend(str(root / words[1]))
    found = cli.parsed(shlex.split(words[2]))
    (handler,) = load(found.handler, found.handler_option)
    assert (type(handler).__name__, handler.rate) == ("PublishRate", 1000.0)  # type: ignore[attr-defined]
