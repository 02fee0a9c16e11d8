"""The bundle of Databricks: its files fit the types of the Databricks CLI, and its job calls the wheel task as that is.
What a workspace does with it is not tested.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from databricks.bundles.jobs import Job

EXAMPLES = Path(__file__).parents[1] / "examples"
BUNDLE = EXAMPLES / "bundle"


@pytest.fixture(scope="module")
def bundle() -> dict[str, Any]:
    return yaml.safe_load((BUNDLE / "databricks.yml").read_text())


@pytest.fixture(scope="module")
def jobs(bundle: dict[str, Any]) -> dict[str, dict[str, Any]]:
    files = [path for pattern in bundle["include"] for path in BUNDLE.glob(pattern)]
    return {
        name: job
        for path in files
        for name, job in yaml.safe_load(path.read_text())["resources"]["jobs"].items()
    }


def test_a_job_of_the_bundle_has_the_fields_of_a_job(jobs: dict[str, dict[str, Any]]) -> None:
    assert list(jobs) == ["orders"]
    for job in jobs.values():
        Job.from_dict(job)
    broken = {**jobs["orders"], "max_concurent_runs": 1}
    with pytest.raises(ValueError, match="max_concurent_runs"):
        Job.from_dict(broken)


def test_the_job_calls_the_entry_point_of_the_wheel_with_its_arguments(
    bundle: dict[str, Any], jobs: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "wheel_task")
    from orders_job import main

    (task,) = jobs["orders"]["tasks"]
    project = (EXAMPLES / "wheel_task" / "pyproject.toml").read_text()
    wheel = task["python_wheel_task"]
    assert f'{wheel["entry_point"]} = "{wheel["package_name"]}.main:main"' in project
    options = main.parse([f"--{name}={value}" for name, value in wheel["named_parameters"].items()])
    assert (options.user, options.secret, options.app) == ("orders", "txmq/orders", "orders")
    sys.modules.pop("orders_job.main", None)


def test_every_variable_and_path_of_the_bundle_exists(
    bundle: dict[str, Any], jobs: dict[str, dict[str, Any]]
) -> None:
    used = set(re.findall(r"\$\{var\.(\w+)\}", str(jobs)))
    assert used == set(bundle["variables"])
    for artifact in bundle["artifacts"].values():
        assert (BUNDLE / artifact["path"] / "pyproject.toml").is_file()
    assert jobs["orders"]["max_concurrent_runs"] == 1
