"""The files that GitHub alone reads: the form of a bug is one that it shows, and leads to files that are there.

Not here: whether the commands that it names exist (``test_docs.py``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
# type -> what it must say; https://docs.github.com/en/communities/using-templates-to-encourage-useful-issues-and-pull-requests/syntax-for-githubs-form-schema
FIELDS = {"markdown": {"value"}, "input": {"label"}, "textarea": {"label"}, "dropdown": {"label", "options"}}


def read(name: str) -> dict[str, Any]:
    (found,) = [path for path in FORMS if path.name == name]
    return yaml.safe_load(found.read_text())


def test_the_form_of_a_bug_has_the_fields_of_a_form() -> None:
    form = read("bug.yml")
    assert {"name", "description", "body"} <= form.keys()
    assert [field for field in form["body"] if not FIELDS[field["type"]] <= field["attributes"].keys()] == []
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    for names in ([field["id"] for field in asked], [field["attributes"]["label"] for field in asked]):
        assert len({*names}) == len(names)
    assert {"version", "engine", "session", "code", "steps", "status"} <= {field["id"] for field in asked}


def test_a_form_leads_to_files_of_this_repository_and_to_no_address_that_it_does_not_have() -> None:
    assert read("config.yml") == {"blank_issues_enabled": True}
    links = re.findall(r"\]\(([^)]+)\)", read("bug.yml")["body"][0]["attributes"]["value"])
    assert "../blob/HEAD/SECURITY.md" in links, "from /OWNER/NAME/issues/new"
    assert [link for link in links if not (ROOT / link.removeprefix("../blob/HEAD/")).is_file()] == []
