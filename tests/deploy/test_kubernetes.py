"""The Helm chart: its objects are valid, fit each other, and fit the gateway."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import Config
from gateway.config.file import load
from tests.deploy.conftest import CHART, ROOT, Objects

VERSIONS = ("1.27.0", kubernetes_validate.latest_version())
CUSTOM = {"ServiceMonitor", "ScaledObject"}  # of operators: their schemas are not Kubernetes'
PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}]
EVERYTHING: dict[str, Any] = {
    "image": {"digest": "sha256:" + "a" * 64, "pullSecrets": [{"name": "registry"}]},
    "replicas": 2,
    "config": {
        "server": {"drain_timeout_seconds": 90.5, "max_body_bytes": 16777216},
        "discovery": {"kubernetes": [{"service": "a"}, {"service": "b", "namespace": "models"}, {"selector": "x=y"}]},
        "batches": {"max_lines": 1000000},
        "auth": {"keys": [{"name": "team-a", "key": "${TEAM_A_KEY}", "tokens_per_minute": 2000000}]},
    },
    "secret": {"values": {"TEAM_A_KEY": "sk-a", "GATEWAY_ADMIN_TOKEN": "s3cret"}},
    "valkey": {"enabled": True},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"clients": PEERS, "scrapers": PEERS},
    "autoscaling": {"kind": "hpa"},
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "volumes": [{"name": "models", "emptyDir": {}}],
    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
}
KEDA = {**EVERYTHING, "autoscaling": {"kind": "keda"}}
Make = Callable[..., Objects]


def only(found: Objects, kind: str, name: str = "gateway") -> dict[str, Any]:
    (one,) = [each for each in found if each["kind"] == kind and each["metadata"]["name"] == name]
    return one


def pod_of(found: Objects) -> dict[str, Any]:
    pod: dict[str, Any] = only(found, "Deployment")["spec"]["template"]
    return pod


def config_of(found: Objects, folder: Path) -> Config:
    file = folder / "gateway.yaml"
    file.write_text(only(found, "ConfigMap")["data"]["gateway.yaml"])
    return load(file, [])


def documents_of(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def test_the_chart_has_no_lint(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_manifests_are_what_the_chart_makes_by_default(template: Callable[[dict[str, Any]], str]) -> None:
    committed = (ROOT / "deploy/kubernetes/gateway.yaml").read_text()
    assert committed.partition("---\n")[2] == template({}).partition("---\n")[2], "run `make manifests`"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [{}, EVERYTHING, KEDA], ids=["default", "hpa", "keda"])
def test_every_object_is_valid(objects: Make, values: dict[str, Any], version: str) -> None:
    found = objects(**values)
    for each in found:
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, version, strict=True)
    assert {each["metadata"]["namespace"] for each in found} <= {"inference", "models"}


def test_an_object_that_is_not_valid_is_noticed(objects: Make) -> None:
    wrong = only(objects(), "Service")
    wrong["spec"]["ports"][0]["targetPrt"] = "http"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"replicas": 0},
        {"valkey": {"url": "redis://elsewhere"}},
        {"image": {"digest": "sha256:abc"}},
        {"config": {"server": {"port": 9000}}},
        {"autoscaling": {"kind": "both"}},
        {"autoscaling": {"demand": 0.8}},
        {"secret": {"values": {"TEAM A": "x"}}},
        {"networkPolicy": {"clients": [{"namespace": "apps"}]}},
    ],
)
def test_wrong_values_are_refused(template: Callable[[dict[str, Any]], str], values: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="meet the specifications of the schema"):
        template(values)


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_the_gateway_accepts_its_configuration_and_listens_where_the_pod_says(
    objects: Make, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in EVERYTHING["secret"]["values"].items():
        monkeypatch.setenv(name, value)
    found = objects(**values)
    config, (container,) = config_of(found, tmp_path), pod_of(found)["spec"]["containers"]
    assert config.server.admin is not None
    assert config.server.metrics is not None
    assert config.server.admin.host == "127.0.0.1"
    assert config.config.watch
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": config.server.port, "metrics": config.server.metrics.port}
    assert {config.server.host, config.server.metrics.host} == {"0.0.0.0"}
    if values:
        assert config.server.admin.token == "s3cret"
        assert config.auth.keys[0].tokens_per_minute == 2000000
        assert container["envFrom"] == [{"secretRef": {"name": only(found, "Secret")["metadata"]["name"]}}]
        assert "s3cret" not in str([each for each in found if each["kind"] != "Secret"])
    assert config.coordination.url == ("redis://gateway-valkey:6379" if values else "")


@pytest.mark.parametrize("server", [{}, {"drain_delay_seconds": 0}, {"drain_timeout_seconds": 90.5}])
def test_a_pod_has_time_to_drain(objects: Make, server: dict[str, Any], tmp_path: Path) -> None:
    found = objects(config={"server": server})
    drain = config_of(found, tmp_path).server
    assert 10 < pod_of(found)["spec"]["terminationGracePeriodSeconds"] - (
        drain.drain_delay_seconds + drain.drain_timeout_seconds
    ) < 20  # fmt: skip


def test_selectors_and_ports_lead_to_the_pod(objects: Make) -> None:
    found = objects(**EVERYTHING)
    labels, (container,) = pod_of(found)["metadata"]["labels"], pod_of(found)["spec"]["containers"]
    ports = {each["name"] for each in container["ports"]}
    services = [only(found, "Service"), only(found, "Service", "gateway-metrics")]
    selectors = [each["spec"]["selector"] for each in services]
    selectors += [
        only(found, kind)["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")
    ]
    policy = only(found, "NetworkPolicy")["spec"]
    selectors.append(policy["podSelector"]["matchLabels"])
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert {port["targetPort"] for each in services for port in each["spec"]["ports"]} == ports
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
    assert all(rule["from"] == PEERS for rule in policy["ingress"])
    probes = [container[name]["httpGet"]["port"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert set(probes) == {"metrics"}
    monitor = only(found, "ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"]
    (scraped,) = [each for each in services if wanted.items() <= each["metadata"]["labels"].items()]
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in scraped["spec"]["ports"]}


def test_the_pod_may_do_little(objects: Make) -> None:
    spec = pod_of(objects())["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert f"USER {spec['securityContext']['runAsUser']}:" in (ROOT / "Dockerfile").read_text()


def test_replicas_reach_valkey_and_nothing_else_does(objects: Make, tmp_path: Path) -> None:
    found = objects(replicas=3, valkey={"enabled": True, "image": "registry.example/valkey:8"})
    service, policy = only(found, "Service", "gateway-valkey"), only(found, "NetworkPolicy", "gateway-valkey")
    pod = only(found, "Deployment", "gateway-valkey")["spec"]["template"]
    ((host, port),) = config_of(found, tmp_path).coordination.address.hosts
    assert (host, port) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    assert config_of(found, tmp_path).coordination.expected_replicas == 3
    (container,), labels = pod["spec"]["containers"], pod["metadata"]["labels"]
    assert (container["image"], container["ports"][0]["containerPort"]) == ("registry.example/valkey:8", port)
    assert container["securityContext"] == pod_of(found)["spec"]["containers"][0]["securityContext"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["spec"]["ingress"]
    selected = rule["from"][0]["podSelector"]["matchLabels"]
    assert selected.items() <= pod_of(found)["metadata"]["labels"].items()
    assert not selected.items() <= labels.items()


def test_without_valkey_and_a_network_policy_there_is_neither(objects: Make, tmp_path: Path) -> None:
    assert [each for each in objects() if "valkey" in each["metadata"]["name"]] == []
    found = objects(valkey={"enabled": True}, networkPolicy={"enabled": False})
    assert [each["kind"] for each in found if "valkey" in each["metadata"]["name"]] == ["Service", "Deployment"]
    own = objects(config={"coordination": {"url": "redis://redis:6379"}}, replicas=2)
    assert config_of(own, tmp_path).coordination.url == "redis://redis:6379"


def test_endpoint_slices_can_be_read_where_they_are_and_nothing_else(objects: Make) -> None:
    found = objects(**EVERYTHING)
    roles = [each for each in found if each["kind"] == "Role"]
    bindings = [each for each in found if each["kind"] == "RoleBinding"]
    namespaces = ["inference", "models"]
    assert sorted(each["metadata"]["namespace"] for each in roles) == namespaces
    assert sorted(each["metadata"]["namespace"] for each in bindings) == namespaces
    (rules,) = {str(each["rules"]) for each in roles}
    (rule,) = yaml.safe_load(rules)
    assert (rule["resources"], rule["verbs"]) == (["endpointslices"], ["get", "list", "watch"])
    account = {"kind": "ServiceAccount", "name": "gateway", "namespace": "inference"}
    assert all(each["subjects"] == [account] for each in bindings)
    assert pod_of(found)["spec"]["automountServiceAccountToken"]
    without = objects(config={"discovery": {"kubernetes": []}, "backends": [{"url": "http://vllm:8000"}]})
    assert not [each for each in without if each["kind"] == "Role"]
    assert not pod_of(without)["spec"]["automountServiceAccountToken"]


def test_a_changed_secret_restarts_the_pods(objects: Make) -> None:
    one, other = (pod_of(objects(secret={"values": {"A": value}}))["metadata"]["annotations"] for value in "xy")
    assert one["checksum/secret"] != other["checksum/secret"]


def test_autoscalers_scale_the_engines_by_metrics_that_exist(objects: Make) -> None:
    hpa = only(objects(**EVERYTHING), "HorizontalPodAutoscaler")["spec"]
    keda = only(objects(**KEDA), "ScaledObject")["spec"]
    assert (
        hpa["scaleTargetRef"]
        == keda["scaleTargetRef"]
        == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "vllm"}
    )
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (trigger,), (metric,) = keda["triggers"], hpa["metrics"]
    assert trigger["metadata"]["threshold"] == metric["external"]["target"]["value"]
    assert set(map(type, trigger["metadata"].values())) == {str}
    page = (ROOT / "docs/metrics.md").read_text()
    for query in (trigger["metadata"]["query"], *documents_of("autoscaling.md", "promql")):
        names = re.findall(r"gateway_\w+", query)
        assert len(names) == 3
        assert all(f"`{name}`" in page for name in names)


def test_examples_of_the_documentation_are_valid(objects: Make) -> None:
    examples = [
        yaml.safe_load_all(each) for name in ("kubernetes.md", "autoscaling.md") for each in documents_of(name, "yaml")
    ]
    kinds = []
    for example in [document for documents in examples for document in documents]:
        if "kind" in example:
            kubernetes_validate.validate(example, VERSIONS[-1], strict=True)
        elif "externalRules" not in example:
            objects(**example)
        kinds.append(example.get("kind", ""))
    assert kinds == ["Service", "Deployment", "", "", "", ""]
