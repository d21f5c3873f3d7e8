"""`quire deploy kubernetes` with a router, pools of prefill servers, servers of several hosts, and autoscaling."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from tests.entrypoints.cli.test_deploy import HARD, MODEL, deploy, problem, promql, served

from quire.config.kv_transfer import read_kv_transfer_config
from quire.entrypoints.cli.main import build_parser
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.prometheus import EngineCollector

Manifest = dict[str, Any]
SCALED = ["--max-replicas", "5", "--prometheus", "http://prometheus:9090"]

TEMPLATE = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {"metadata": {}, "spec": {}},
}
SPECS: dict[str, dict[str, Any]] = {
    "LeaderWorkerSet": {
        "type": "object", "additionalProperties": False, "required": ["leaderWorkerTemplate"],
        "properties": {
            "replicas": {"type": "integer", "minimum": 0},
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
            "rolloutStrategy": {"type": "object"},
            "networkConfig": {"type": "object"},
            "leaderWorkerTemplate": {
                "type": "object", "additionalProperties": False, "required": ["workerTemplate"],
                "properties": {
                    "size": {"type": "integer", "minimum": 1},
                    "restartPolicy": {"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                    "leaderTemplate": TEMPLATE, "workerTemplate": TEMPLATE, "subGroupPolicy": {"type": "object"},
                },
            },
        },
    },
    "ScaledObject": {
        "type": "object", "additionalProperties": False, "required": ["scaleTargetRef", "triggers"],
        "properties": {
            "scaleTargetRef": {
                "type": "object", "additionalProperties": False, "required": ["name"],
                "properties": {key: {"type": "string"} for key in ("apiVersion", "kind", "name", "envSourceContainerName")},
            },
            "minReplicaCount": {"type": "integer"}, "maxReplicaCount": {"type": "integer"},
            "pollingInterval": {"type": "integer"}, "cooldownPeriod": {"type": "integer"},
            "advanced": {"type": "object", "additionalProperties": False, "properties": {"horizontalPodAutoscalerConfig": {}}},
            "triggers": {
                "type": "array", "minItems": 1,
                "items": {
                    "type": "object", "additionalProperties": False, "required": ["type", "metadata"],
                    "properties": {
                        "type": {"const": "prometheus"}, "name": {"type": "string"},
                        "metricType": {"enum": ["AverageValue", "Value", "Utilization"]},
                        "metadata": {
                            "type": "object", "additionalProperties": {"type": "string"},
                            "required": ["serverAddress", "query", "threshold"],
                        },
                    },
                },
            },
        },
    },
}  # fmt: skip
"""What the definitions of kinds that are not Kubernetes' own allow below `spec`, as far as it is used."""


def written(folder: Path, *words: str) -> list[Manifest]:
    """The manifests, valid for their kinds."""
    validate = pytest.importorskip("kubernetes_validate").validate
    found = list(yaml.safe_load_all(deploy(folder, "kubernetes", MODEL, *words)["quire.yaml"]))
    for each in found:
        if each["kind"] not in SPECS:
            validate(each, "1.33", strict=True)
            continue
        jsonschema.validate(each["spec"], SPECS[each["kind"]])
        for template in each["spec"].get("leaderWorkerTemplate", {}).values():
            if isinstance(template, dict):
                whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
                validate(whole, "1.33", strict=True)
    return found


def of_kind(found: list[Manifest], kind: str) -> dict[str, Manifest]:
    """By name."""
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


def args_of(template: Manifest) -> list[str]:
    """A container's words as Kubernetes gives them, variables as they are written."""
    return [word.replace("$$", "$") for word in template["spec"]["containers"][0]["args"]]


def has(labels: dict[str, str], selector: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_a_router_knows_every_server_that_there_may_be_by_its_name(tmp_path: Path) -> None:
    found = written(tmp_path, "--replicas", "2", "--router", "--port", "9000", *SCALED)
    (name,) = servers = of_kind(found, "StatefulSet")
    pods, services = servers[name]["spec"]["template"], of_kind(found, "Service")
    words = args_of(of_kind(found, "Deployment")["quire-router"]["spec"]["template"])
    args = build_parser("route").parse_args(words[1:])
    headless = servers[name]["spec"]["serviceName"]
    assert words[0] == "route" and (args.host, args.port) == ("0.0.0.0", 9000)
    assert args.backend == [f"http://{name}-{number}.{headless}:9000" for number in range(5)] and not args.prefill
    assert services[headless]["spec"]["clusterIP"] == "None"
    assert has(pods["metadata"]["labels"], services[headless]["spec"]["selector"])
    router = of_kind(found, "Deployment")["quire-router"]["spec"]["template"]["metadata"]["labels"]
    front = services["quire"]["spec"]["selector"]
    assert has(router, front) and not has(pods["metadata"]["labels"], front)


def test_prefill_servers_keep_pages_for_those_that_answer(tmp_path: Path) -> None:
    given = {"kv_connector": "nixl", "kv_connector_extra_config": {"backends": ["UCX"]}}
    found = written(tmp_path, "--prefill-replicas", "3", "--kv-transfer-config", json.dumps(given), *HARD)
    pools = {name: each["spec"] for name, each in of_kind(found, "StatefulSet").items()}
    assert {name: pool["replicas"] for name, pool in pools.items()} == {"quire-servers": 1, "quire-prefill": 3}
    wanted = served(["serve", MODEL, *HARD])
    for name, role in (("quire-servers", "kv_consumer"), ("quire-prefill", "kv_producer")):
        args = served(args_of(pools[name]["template"]))
        config = read_kv_transfer_config(args["kv_transfer_config"])
        assert config is not None and (config.kv_connector, config.kv_role, config.kv_ip) == ("nixl", role, "$(POD_IP)")
        assert config.kv_connector_extra_config["backends"] == ["UCX"] and config.kv_connector_extra_config["peers"]
        assert args["hf_overrides"] == wanted["hf_overrides"]
        assert "POD_IP" in [each["name"] for each in pools[name]["template"]["spec"]["containers"][0]["env"]]
        assert "$$HOME" in " ".join(pools[name]["template"]["spec"]["containers"][0]["args"])
    words = args_of(of_kind(found, "Deployment")["quire-router"]["spec"]["template"])
    args = build_parser("route").parse_args(words[1:])
    assert args.prefill == [f"http://quire-prefill-{number}.quire-prefill:8000" for number in range(3)]
    assert args.backend == ["http://quire-servers-0.quire-servers:8000"]
    assert of_kind(found, "NetworkPolicy")["quire"]["spec"]["ingress"][0]["ports"] == [{"port": 8000}]


@pytest.mark.parametrize("more", [[], ["--router"], ["--prefill-replicas", "1"]])
def test_servers_are_added_by_the_requests_that_run_and_wait(tmp_path: Path, more: list[str]) -> None:
    found = written(tmp_path, *SCALED, "--scale-at", "7", "--served-model-name", "shown", *more)
    scaled = of_kind(found, "ScaledObject")["quire"]["spec"]
    target = of_kind(found, scaled["scaleTargetRef"]["kind"])[scaled["scaleTargetRef"]["name"]]
    assert target["apiVersion"] == scaled["scaleTargetRef"]["apiVersion"] and "replicas" not in target["spec"]
    (trigger,) = scaled["triggers"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"], trigger["metadata"]["threshold"]) == (1, 5, "7")
    registry = CollectorRegistry()
    registry.register(EngineCollector(EngineMetrics("shown", 100), {"block_size": "16"}, "quire"))
    query, told = trigger["metadata"]["query"], generate_latest(registry).decode()
    assert promql(query)
    for state in ("running", "waiting"):
        assert f'sum(quire:num_requests_{state}{{model_name="shown"' in query
        assert re.search(rf'^quire:num_requests_{state}{{.*model_name="shown"', told, re.MULTILINE)
    assert ('pod!~"quire-prefill-.*"' in query) == ("--prefill-replicas" in more)


def test_servers_that_compute_prompts_are_added_by_their_own_requests(tmp_path: Path) -> None:
    scaling = ["--max-prefill-replicas", "4", "--prefill-scale-at", "3", "--prometheus", "http://prometheus:9090"]
    found = written(tmp_path, "--prefill-replicas", "2", *scaling)
    ((name, scaled),) = of_kind(found, "ScaledObject").items()
    spec, pools = scaled["spec"], of_kind(found, "StatefulSet")
    assert name == spec["scaleTargetRef"]["name"] == "quire-prefill"
    assert "replicas" not in pools["quire-prefill"]["spec"] and pools["quire-servers"]["spec"]["replicas"] == 1
    (trigger,) = spec["triggers"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], trigger["metadata"]["threshold"]) == (2, 4, "3")
    assert 'pod=~"quire-prefill-.*"' in trigger["metadata"]["query"]
    words = args_of(of_kind(found, "Deployment")["quire-router"]["spec"]["template"])
    assert len(build_parser("route").parse_args(words[1:]).prefill) == 4


@pytest.mark.parametrize("more", [[], ["--router", "--replicas", "2"]])
def test_a_server_of_several_hosts_is_a_group_of_pods(tmp_path: Path, more: list[str]) -> None:
    found = written(tmp_path, "--nnodes", "2", "-tp", "4", "-pp", "2", *more, *HARD)
    spec = of_kind(found, "LeaderWorkerSet")["quire-servers"]["spec"]["leaderWorkerTemplate"]
    leader, rank = spec["leaderTemplate"], spec["workerTemplate"]
    assert spec["size"] == 2
    for template, is_headless in ((leader, False), (rank, True)):
        container, words = template["spec"]["containers"][0], args_of(template)
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
        assert ("livenessProbe" in container) != is_headless
        args = served([word.replace("$(LWS_WORKER_INDEX)", "1" if is_headless else "0") for word in words])
        assert (args["nnodes"], args["master_addr"]) == (2, "$(LWS_LEADER_ADDRESS)")
        assert (args["node_rank"], args["headless"]) == (int(is_headless), is_headless)
    front = of_kind(found, "Service")["quire"]["spec"]["selector"]
    labels = [template["metadata"]["labels"] for template in (leader, rank)]
    assert [has(each, front) for each in labels] == [not more, False]
    assert "quire-servers" not in of_kind(found, "Service")  # it makes one of its own


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["compose", MODEL, "--router"], "router: only kubernetes"),
        (["docker", MODEL, "--prefill-replicas", "1"], "prefill_replicas: only kubernetes"),
        (["kubernetes", MODEL, "--max-replicas", "3"], "prometheus: servers are added"),
        (["kubernetes", MODEL, "--replicas", "5", *SCALED], "max_replicas: 5 must be above --replicas 5"),
        (["kubernetes", MODEL, "--nnodes", "2", "-tp", "2", "--prefill-replicas", "1"], "do not hand over pages"),
        (["kubernetes", MODEL, "--max-prefill-replicas", "2"], "max_prefill_replicas: it needs a pool"),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert text in problem(capsys, *words, "--output", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
