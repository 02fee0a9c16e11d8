"""The dashboard of Grafana and the alert rules of Prometheus in ``docs/monitoring``: each name and label that
they use is one that ``/metrics`` has, and promtool takes the rules where there is one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from broker_core.client.broker import BrokerClient
from broker_core.core.credentials import Credentials
from tests.progress import GUARD_S
from tests.server.conftest import MicroBatch
from tests.server.http.http_client import PASSWORD, Api, add_people, serving

FOLDER = Path(__file__).parents[3] / "docs" / "monitoring"
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
FOREIGN = {"up"}  # a metric of Prometheus itself


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> dict[str, list[str]]:
    """By alert and by panel."""
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    found = {panel["title"]: [each["expr"] for each in panel["targets"]] for panel in dashboard["panels"]}
    return {**found, **{rule["alert"]: [rule["expr"]] for rule in rules()}}


def used(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Metrics, with the labels that their selectors and the groupings of the expression name."""
    grouped = {
        label.strip() for labels in re.findall(r"\bby \(([^)]*)\)", expression) for label in labels.split(",")
    }
    for name, selector in re.findall(r"\b((?:txmq|rabbitmq)_\w+|up)\b(\{[^}]*\})?", expression):
        yield name, {*re.findall(r"(\w+)\s*[=!]~?", selector), *grouped}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names, with their labels, of a broker that has something of everything."""
    with serving(tmp_path_factory.mktemp("http")) as broker:
        add_people(broker)
        with BrokerClient(broker.url, credentials=Credentials("boss", PASSWORD)) as client:
            with client.channel() as channel:
                channel.queue_declare("in")
                channel.queue_declare("out")
                channel.publish(b"x", routing_key="in")
            MicroBatch(client, "in", "out", app="sums").run()
        api = Api(broker.http_urls[0], "watcher")
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(api.get("/metrics")):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        api.close()
        return found


@pytest.mark.parametrize("place", expressions())
def test_every_name_and_label_is_one_of_the_metrics(place: str, metrics: dict[str, set[str]]) -> None:
    for expression in expressions()[place]:
        found = list(used(expression))
        assert found, expression
        for name, labels in found:
            if name not in FOREIGN:
                assert name in metrics, expression
                assert labels <= metrics[name] | SCRAPED, expression


def test_the_runbook_has_each_alert_and_no_other() -> None:
    runbook = (FOLDER.parent / "runbook.md").read_text()
    alerts = runbook.split("## Alerts\n", 1)[1].split("\n## ", 1)[0]
    assert re.findall(r"^### (\w+)$", alerts, re.MULTILINE) == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook_url"] == f"runbook.html#{rule['alert'].lower()}"


def test_a_counter_is_only_looked_at_as_a_rate_and_a_gauge_never(metrics: dict[str, set[str]]) -> None:
    for place, texts in expressions().items():
        for expression in texts:
            for name, _ in used(expression):
                rated = re.search(rf"\b(?:rate|increase)\({name}\b", expression) is not None
                assert rated == name.endswith("_total"), (place, expression)


def test_rules_and_dashboard_say_what_they_mean(metrics: dict[str, set[str]]) -> None:
    for rule in rules():
        labels = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        names = [name for name, _ in used(rule["expr"])]
        known = set().union(SCRAPED, *(metrics.get(name, set()) for name in names))
        assert labels <= known and rule["labels"]["severity"] in ("warning", "critical"), rule
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    spots = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(spots)) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    names = {name for texts in expressions().values() for text in texts for name, _ in used(text)}
    unseen = set(metrics) - names
    assert unseen == {"txmq_build_info"}, "the dashboard or a rule uses each metric"


def test_promtool_takes_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    done = subprocess.run(
        [promtool, "check", "rules", str(FOLDER / "alerts.yml")],
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == 0 and f"{len(rules())} rules found" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("alert", "series", "fires"),
    [
        ("TxmqDown", {'up{job="txmq",instance="a"}': "0x30"}, True),
        ("TxmqStoreFailed", {'txmq_store_failed{instance="a"}': "1x30"}, True),
        ("TxmqPublishersWait", {'txmq_alarm{instance="a",resource="disk"}': "1x30"}, True),
        ("TxmqPublishersWait", {'txmq_alarm{instance="a",resource="disk"}': "0x30"}, False),
        ("TxmqTransactionInDoubt", {'txmq_prepared_transactions{instance="a"}': "2x30"}, True),
        ("TxmqRowsNotApplied", {'txmq_app_unapplied{instance="a",app="x",vhost="/"}': "1x30"}, True),
        (
            "TxmqAppStopped",
            {
                'txmq_app_lag{instance="a",app="x",vhost="/"}': "5x30",
                'txmq_app_last_batch_timestamp_seconds{instance="a",app="x",vhost="/"}': "1x30",
            },
            True,
        ),
        (
            "TxmqAppStopped",
            {
                'txmq_app_lag{instance="a",app="x",vhost="/"}': "0x30",
                'txmq_app_last_batch_timestamp_seconds{instance="a",app="x",vhost="/"}': "1x30",
            },
            False,
        ),
        ("TxmqAppLate", {'txmq_app_lag_seconds{instance="a",app="x",vhost="/"}': "1000+60x30"}, True),
        ("TxmqAppLate", {'txmq_app_lag_seconds{instance="a",app="x",vhost="/"}': "60x30"}, False),
        ("TxmqAppFallsBehind", {'txmq_app_lag{instance="a",app="x",vhost="/"}': "20000+100x30"}, True),
        ("TxmqAppFallsBehind", {'txmq_app_lag{instance="a",app="x",vhost="/"}': "20000-100x30"}, False),
    ],
)
def test_alerts_fire_when_they_should(
    alert: str, series: dict[str, str], fires: bool, tmp_path: Path
) -> None:
    """A minute is a step; asked for at the thirtieth."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    values = {
        name: text if re.search("[+-]", text) else text.replace("x", "+0x") for name, text in series.items()
    }
    case = {
        "rule_files": [str(FOLDER / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": text} for name, text in values.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
                        "eval_time": "30m",
                        "exp_samples": [{"labels": "{}", "value": 1 if fires else 0}],
                    }
                ],
            }
        ],
    }
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump(case))
    done = subprocess.run(
        [promtool, "test", "rules", str(file)], capture_output=True, text=True, timeout=GUARD_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
