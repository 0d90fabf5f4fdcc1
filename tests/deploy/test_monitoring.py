"""The files of config/prometheus and config/grafana: rules that hold, runbooks that exist, metrics that there are."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.app import Gateway
from gateway.config import Config
from gateway.core.backends.settings import BackendConfig
from gateway.core.observe.metrics import ProcessMetrics
from gateway.features.coordination.settings import CoordinationConfig
from tests.prometheus import ALERTS, DASHBOARD, ROOT, alerts, expressions, graphs, rows_and_graphs, tool
from tests.unit.test_links import anchors

CASES = Path(__file__).with_name("alerts_test.yaml")
NAME = re.compile(r"\b(?:gateway|process)_[a-z_]+\b")
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]


def metric_names() -> set[str]:
    """Every series of the /metrics of one gateway among several."""
    pytest.importorskip("hiredis")
    several = CoordinationConfig(url="redis://127.0.0.1:6379")
    gateway = Gateway(Config(backends=(BackendConfig(url="http://127.0.0.1:8000"),), coordination=several), None)
    names = set()
    for metric in gateway.core.metrics:
        families = metric.families() if isinstance(metric, ProcessMetrics) else [metric.family()]
        for family in families:
            endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            names |= {family.name + ending for ending in endings}
    return names


def promtool(*arguments: str) -> str:
    """What it prints; it must succeed."""
    done = subprocess.run([tool("promtool"), *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_configuration_of_prometheus_and_its_rules_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "config", str(ROOT / "config/prometheus/scrape.yaml"))


def test_each_alert_fires_where_it_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(CASES))


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(alerts())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_has_a_severity_a_sentence_and_a_section_in_the_documentation(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"].endswith(".")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page == "docs/troubleshooting.md"
    assert anchor in anchors(ROOT / page)
    assert anchor == re.sub(r"(?<=[a-z])(?=[A-Z])", "-", rule["alert"]).lower()


def test_alerts_use_metrics_that_exist() -> None:
    names = {name for expression in alerts().values() for name in NAME.findall(expression)}
    assert names - metric_names() == set()
    assert len(names) > 15


def test_each_panel_has_an_id_and_each_graph_a_title_of_its_own_and_a_question() -> None:
    panels = [*rows_and_graphs()]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({graph["title"] for graph in graphs()}) == len(graphs())
    assert {graph["description"][-1] for graph in graphs()} <= {"?", "."}
    for graph in graphs():
        assert len({target["refId"] for target in graph["targets"]}) == len(graph["targets"])


def test_the_dashboard_is_of_no_grafana_in_particular() -> None:
    document = json.loads(DASHBOARD.read_text())
    assert (document.get("id"), document["uid"]) == (None, "vllm-batching-gateway")
    assert {graph["datasource"]["uid"] for graph in graphs()} == {"${datasource}"}


def test_graphs_and_variables_use_metrics_that_exist() -> None:
    asked = [str(each["query"]) for each in json.loads(DASHBOARD.read_text())["templating"]["list"]]
    asked += [expression for graph in graphs() for expression in expressions(graph)]
    names = {name for each in asked for name in NAME.findall(each)}
    assert names - metric_names() == set()
    assert len(names) > 20


def test_the_expressions_of_graphs_are_valid(tmp_path: Path) -> None:
    found = [expression for graph in graphs() for expression in expressions(graph)]
    assert [expression for expression in found if "$" in expression] == []
    rules = [{"record": f"graph:{number}", "expr": expression} for number, expression in enumerate(found)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "graphs", "rules": rules}]}))
    assert f"{len(found)} rules found" in promtool("check", "rules", str(tmp_path / "rules.yaml"))


def test_grafana_finds_the_dashboard_in_the_folder_that_it_reads() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())["services"]["grafana"]["volumes"]
    mounted = dict(entry.split(":")[:2] for entry in compose)
    [provider] = yaml.safe_load((ROOT / "config/grafana/folder.yaml").read_text())["providers"]
    assert mounted["../../config/grafana/gateway.json"] == f"{provider['options']['path']}/gateway.json"
    [source] = yaml.safe_load((ROOT / "config/grafana/datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_the_page_has_every_alert_and_every_panel() -> None:
    text = (ROOT / "docs/monitoring.md").read_text()
    for rule in RULES:
        assert f"| [{rule['alert']}](troubleshooting.md#" in text
        assert f"| {rule['labels']['severity']} | {rule.get('for', '')} |" in text
    for graph in graphs():
        assert re.search(rf"[|,] {re.escape(graph['title'])}[ ,]", text)
