"""One row of the table of routes: the table is what is served, permitted and documented."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from broker_core.server.http.call import HttpCall
from broker_core.server.http.gate import Need


class Route(NamedTuple):
    """``path``: with names in braces. ``works``: it commits, reads the disk or takes long, so it runs in a
    thread beside the loop. ``text``: what it does, for people. ``page``: for browsers, with a session, forms
    and HTML. ``commits``: also as a GET; then no page of another
    origin may ask. ``counted``: it lists no more than ``Backend.things`` counts, so that
    a few of them are shown in the loop: to hand them to a thread and back costs half as much again.
    ``kept_s``: all who may see the answer get the same one for so long. ``often``: who asks for it often gets
    what is a moment old (``state/answer_cache.py``).
    """

    method: str
    path: str
    need: Need
    answer: Callable[[HttpCall], object]
    text: str
    works: bool = True
    page: bool = False
    commits: bool = False
    counted: bool = False
    kept_s: float = 0.0
    often: bool = False

    @property
    def waits(self) -> bool:
        """For a commit: as long as the disk takes."""
        return self.commits or self.method != "GET"


def read(path: str, need: Need, answer: Callable[[HttpCall], object], text: str) -> Route:
    return Route("GET", path, need, answer, text, works=False, often=True)


def read_all(path: str, need: Need, answer: Callable[[HttpCall], object], text: str) -> Route:
    """A list that may be long."""
    return Route("GET", path, need, answer, text, often=True)


def read_list(path: str, need: Need, answer: Callable[[HttpCall], object], text: str) -> Route:
    """The same, of things that are counted."""
    return Route("GET", path, need, answer, text, counted=True, often=True)


def page(method: str, path: str, need: Need, answer: Callable[[HttpCall], object], text: str) -> Route:
    """For browsers, and of what the API answers."""
    return Route(method, path, need, answer, f"The page: {text}", page=True)
