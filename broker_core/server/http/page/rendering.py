"""From a template to an answer, and how numbers, sizes and times are written.

Invariant: every value is escaped by the template, whatever it is; markup comes from templates alone. What
cannot be seen of a name is an escape, so that no two look alike; it is not in what the browser sends back
(``exact``). A page runs scripts and styles of this listener, and no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import Response

from broker_core import __version__
from broker_core.core import errors
from broker_core.server.http.call import HttpCall
from broker_core.server.http.gate import looks

FOLDER = Path(__file__).parent
ASSETS = {path.name: path.read_bytes() for path in sorted((FOLDER / "assets").iterdir())}
TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "uplot": "text/plain"}
STAMP = sha256(b"".join(ASSETS.values())).hexdigest()[:12]  # of the assets: another one, another address
HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
NONE = "–"
_STEPS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def count(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.1f}"


def size(value: float | None) -> str:
    if value is None:
        return NONE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def duration(seconds: float | None) -> str:
    """With one unit: an operator looks for the order of it."""
    if seconds is None:
        return NONE
    for step, unit in _STEPS:
        if seconds >= step:
            return (
                f"{seconds / step:,.0f} {unit}" if seconds >= 10 * step else f"{seconds / step:,.1f} {unit}"
            )
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def moment(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def arguments(value: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value[name]}" for name in value)


def visible(value: object) -> object:
    """What the template shows of a value: a text with escapes for what cannot be seen."""
    return errors.visible(value) if type(value) is str else value


def sentence(text: str, *names: object) -> Markup:
    """A text of this listener, with names of others in its braces."""
    return escape(text).format(*map(visible, names))


def exact(value: object) -> Markup:
    """What the browser sends back, or acts on."""
    return escape(value)


def lines(value: str) -> Markup:
    """A text of several lines."""
    return escape("".join(each if each in "\n\t" else errors.printable(each) for each in value))


def spark(values: Sequence[float | None], width: int = 96, height: int = 20) -> Markup:
    """A line of one series, from 0 to its largest value. Only numbers get into it."""
    samples = [(at, value) for at, value in enumerate(values) if value is not None]
    if len(samples) < 2:
        return Markup("")
    step = max(len(samples) // width, 1)
    samples = [max(samples[at : at + step], key=lambda each: each[1]) for at in range(0, len(samples), step)]
    most = max(value for _, value in samples) or 1.0
    first, last = samples[0][0], max(samples[-1][0], samples[0][0] + 1)
    across, up = width - 2, height - 4
    points = " ".join(
        f"{1 + (at - first) / (last - first) * across:.1f},{height - 2 - value / most * up:.1f}"
        for at, value in samples
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" width="{}" height="{}" aria-hidden="true">'
        '<polyline points="{}"/></svg>'
    ).format(width, height, width, height, points)


def link(path: str, **query: object) -> str:
    """``path`` with names as its query, so that none of them is a step of the path."""
    return f"{path}?{urlencode({name: str(value) for name, value in query.items()})}" if query else path


def plot(times: Sequence[float], unit: str, **curves: Sequence[float | None]) -> str:
    """What the script draws."""
    series = [
        {
            "label": name.replace("_", " "),
            "values": [None if each is None else round(each, 3) for each in values],
        }
        for name, values in curves.items()
    ]
    return json.dumps({"times": [round(each, 1) for each in times], "unit": unit, "series": series})


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=visible,
    auto_reload=False,
)
_FILTERS = (count, size, duration, moment, arguments, exact, lines, spark)
_ENVIRONMENT.filters |= {each.__name__: each for each in _FILTERS}
_ENVIRONMENT.globals |= {"link": link, "stamp": STAMP, "version": __version__, "NONE": NONE}


def render_page(template: str, status: int = 200, /, **values: Any) -> Response:
    text = _ENVIRONMENT.get_template(template).render(values)
    return Response(text, status, HEADERS, "text/html; charset=utf-8")


def render(call: HttpCall, template: str, **values: Any) -> Response:
    """A page of someone who has logged in."""
    assert call.at is not None and call.at.session is not None
    session = call.at.session
    notice, session.notice = session.notice, ""
    return render_page(
        template,
        here=call.at.target,
        user=call.user,
        form_secret=session.form,
        looks=looks(call.caller),
        cluster=call.backend.cluster,
        notice=notice,
        **values,
    )


def redirect(call: HttpCall, target: str, notice: str = "") -> Response:
    """After a form: the page that shows what is now. ``notice``: shown on it."""
    if call.at is not None and call.at.session is not None:
        call.at.session.notice = notice
    return Response(status_code=303, headers={**HEADERS, "location": target})
