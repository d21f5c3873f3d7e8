"""`quire deploy`: the files are valid, and the server that they start is the one that the flags describe."""

import json
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.entrypoints.cli import deploy as deploy_command
from quire.entrypoints.cli.main import build_parser, main
from quire.entrypoints.deploy.writing import TARGETS, quoted
from quire.entrypoints.http.api_keys import read_key_file
from quire.entrypoints.http.middleware import OPEN_PATHS, PROBED_PATHS
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.prometheus import EngineCollector, HttpMetrics

MODEL = "org/model"
HARD = ["--hf-overrides", '{"rope_theta": 1e6, "note": "50% of $HOME"}', "--max-model-len", "8k"]


def deploy(folder: Path, target: str, *words: str) -> dict[str, str]:
    """The files that a target writes, by name."""
    assert main(["deploy", target, *words, "--output", str(folder)]) == 0
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def problem(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["deploy", *words]) == 2
    return capsys.readouterr().err


def served(words: list[str]) -> dict[str, Any]:
    """What `quire serve` makes of words."""
    assert words[0] == "serve"
    return vars(build_parser("serve").parse_args(words[1:]))


def manifests(text: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def the_container(text: str) -> dict[str, Any]:
    return manifests(text)["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def test_the_command_knows_the_targets_that_have_templates() -> None:
    assert tuple(TARGETS) == deploy_command.TARGETS


def test_every_target_starts_the_server_that_the_flags_describe(tmp_path: Path) -> None:
    wanted = served(["serve", MODEL, *HARD])
    docker = deploy(tmp_path / "d", "docker", MODEL, *HARD)["Dockerfile"]
    compose = yaml.safe_load(deploy(tmp_path / "c", "compose", MODEL, *HARD)["compose.yaml"])
    cluster = the_container(deploy(tmp_path / "k", "kubernetes", MODEL, *HARD)["quire.yaml"])
    unit = deploy(tmp_path / "s", "systemd", MODEL, *HARD)["quire.service"]
    (line,) = re.findall("^ExecStart=(.*)$", unit, re.MULTILINE)
    of_unit = shlex.split(line.replace("%%", "%").replace("$$", "$"))
    assert Path(of_unit[0]).name == "quire"
    commands = [
        json.loads(re.findall("^CMD (.*)$", docker, re.MULTILINE)[0]),
        [word.replace("$$", "$") for word in compose["services"]["quire"]["command"]],
        [word.replace("$$", "$") for word in cluster["args"]],
        of_unit[1:],
    ]
    for words in commands:
        found = served(words)
        own = {"host", "api_key_file"}
        assert {key: found[key] for key in found.keys() - own} == {key: wanted[key] for key in wanted.keys() - own}
        assert found["api_key_file"].endswith("/api-keys")
    assert [served(words)["host"] for words in commands] == ["0.0.0.0"] * 3 + ["127.0.0.1"]


def test_a_server_has_time_to_drain_before_it_is_killed(tmp_path: Path) -> None:
    words = [MODEL, "--shutdown-timeout", "120"]
    compose = yaml.safe_load(deploy(tmp_path / "c", "compose", *words)["compose.yaml"])
    pod = manifests(deploy(tmp_path / "k", "kubernetes", *words)["quire.yaml"])["Deployment"]["spec"]["template"][
        "spec"
    ]
    assert compose["services"]["quire"]["stop_grace_period"] == "150s"
    leaves = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] == 150 + leaves and leaves > 0
    assert "\nTimeoutStopSec=150\n" in deploy(tmp_path / "s", "systemd", *words)["quire.service"]


@pytest.mark.parametrize("guard", ["clients", "all"])
def test_probes_ask_routes_that_need_no_key(tmp_path: Path, guard: str) -> None:
    words = [MODEL, "--port", "9000", "--api-key-for", guard]
    container = the_container(deploy(tmp_path / "k", "kubernetes", *words)["quire.yaml"])
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert set(paths.values()) <= (set(OPEN_PATHS) | PROBED_PATHS if guard == "clients" else set(OPEN_PATHS))
    assert paths["liveness"] == "/live" and container["ports"][0]["containerPort"] == 9000
    compose = yaml.safe_load(deploy(tmp_path / "c", "compose", *words)["compose.yaml"])["services"]["quire"]
    assert ":9000/health" in compose["healthcheck"]["test"][-1] and compose["ports"] == ["9000:9000"]
    compile(compose["healthcheck"]["test"][-1], "probe", "exec")


def test_devices_and_shared_memory_follow_the_parallel_sizes(tmp_path: Path) -> None:
    words = [MODEL, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]
    container = the_container(deploy(tmp_path / "k", "kubernetes", *words)["quire.yaml"])
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]
    service = yaml.safe_load(deploy(tmp_path / "c", "compose", *words)["compose.yaml"])["services"]["quire"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == 4 and service["shm_size"] == "8gb"
    on_cpu = deploy(tmp_path / "cpu", "kubernetes", MODEL, "--device", "cpu")
    assert "resources" not in the_container(on_cpu["quire.yaml"]) and "/whl/cpu" in on_cpu["Dockerfile"]


def test_a_folder_of_this_machine_is_seen_in_the_container_and_refused_for_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "weights"
    model.mkdir()
    service = yaml.safe_load(deploy(tmp_path / "c", "compose", str(model))["compose.yaml"])["services"]["quire"]
    assert f"{model}:{model}:ro" in service["volumes"] and service["command"][1] == str(model)
    assert "not in the cluster" in problem(capsys, "kubernetes", str(model), "--output", str(tmp_path / "k"))
    assert not (tmp_path / "k").exists()


def test_the_key_is_new_private_and_never_replaced_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = deploy(tmp_path, "compose", MODEL)
    assert f"Clients need a key: there is one in {tmp_path / 'api-keys'}." in capsys.readouterr().err
    (entry,) = read_key_file(str(tmp_path / "api-keys"))
    assert entry.name == "clients" and len(entry.key) > 30
    assert stat.S_IMODE((tmp_path / "api-keys").stat().st_mode) == 0o600
    assert "api-keys" in files[".gitignore"] and "api-keys" in files[".dockerignore"]
    assert not [name for name, text in files.items() if entry.key in text and name != "api-keys"]
    again = deploy(tmp_path, "compose", MODEL, "--force", "--port", "9000")
    assert again["api-keys"] == files["api-keys"] and again["compose.yaml"] != files["compose.yaml"]


def test_a_file_that_differs_is_not_replaced_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deploy(tmp_path, "docker", MODEL)
    deploy(tmp_path, "docker", MODEL)
    (tmp_path / "Dockerfile").write_text("mine")
    assert "differs; give --force" in problem(capsys, "docker", MODEL, "--output", str(tmp_path))
    assert (tmp_path / "Dockerfile").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--uds", "/tmp/x"], "port: a server that is deployed needs a port"),
        (["--headless"], "port: a server that is deployed needs a port"),
        (["--port", "0"], "port: a server that is deployed needs a port"),
        (["--api-key", "k"], "api_key: a key in a command line"),
        (["--api-key-file", "keys"], "api_key_file: not in a container"),
        (["--tensor-parallel-size", "4", "--gpus", "2"], "gpus: 2 are too few"),
        (["--max-model-lenn", "4"], "did you mean --max-model-len"),
        (["--tool-call-parser", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_deployed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert text in problem(capsys, "docker", MODEL, *words, "--output", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_all_that_is_wrong_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ubatch-size", "4", "-tp", "2", "--port", "no", "--replicas", "2"]
    told = problem(capsys, "kubernetes", MODEL, *words, "--output", str(tmp_path)).splitlines()
    assert len(told) == 2 and "ubatch" in told[0] and "--port" in told[1]


@pytest.mark.parametrize("names", ["quire", "vllm"])
def test_every_alert_and_panel_names_metrics_that_the_server_has(tmp_path: Path, names: str) -> None:
    files = deploy(tmp_path, "prometheus", MODEL, "--metrics-names", names)
    registry = CollectorRegistry()
    registry.register(EngineCollector(EngineMetrics("m", 100), {"block_size": "16"}, names))
    registry.register(HttpMetrics())
    families = text_string_to_metric_families(generate_latest(registry).decode())
    known = {sample.name for family in families for sample in family.samples} | {f"{names}:request_success_total"}
    known |= {
        f"{names}:tenant_{kind}_total" for kind in ("requests", "prompt_tokens", "generation_tokens", "rejections")
    }
    rules = yaml.safe_load(files["quire-alerts.yml"])["groups"][0]["rules"]
    board = json.loads(files["grafana/boards/quire.json"])
    expressions = [rule["expr"] for rule in rules if "up{" not in rule["expr"]]
    assert len(rules) == 8 and len(expressions) == len(rules) - 1
    expressions += [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    for expression in expressions:
        named = re.findall(r"\b(?:quire|vllm):\w+", expression)
        assert named and set(named) <= known, expression
        assert all(expression.count(pair[0]) == expression.count(pair[1]) for pair in ("()", "{}", "[]")), expression
    assert all(re.fullmatch(r"\d+m", rule["for"]) and rule["annotations"]["description"] for rule in rules)


def test_prometheus_asks_where_the_server_listens(tmp_path: Path) -> None:
    files = deploy(tmp_path, "prometheus", MODEL, "--host", "10.1.2.3", "--port", "9000", "--api-key-for", "all")
    (job,) = yaml.safe_load(files["prometheus.yml"])["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["10.1.2.3:9000"]}]
    assert job["authorization"]["credentials_file"] == "prometheus-key"


@pytest.mark.parametrize("words", [[], ["--tensor-parallel-size", "2", "--replicas", "3"], ["--device", "cpu"]])
def test_kubernetes_takes_the_manifests(tmp_path: Path, words: list[str]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    found = manifests(deploy(tmp_path, "kubernetes", MODEL, *words)["quire.yaml"])
    assert {"Deployment", "Service", "PersistentVolumeClaim"} <= found.keys()
    for each in found.values():
        validate(each, "1.33", strict=True)
    broken = found["Deployment"]
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["httpget"] = {}
    with pytest.raises(Exception, match="httpget"):
        validate(broken, "1.33", strict=True)


@pytest.mark.parametrize("words", [[], ["--tensor-parallel-size", "2"], ["--device", "cpu"]])
def test_compose_takes_the_file(tmp_path: Path, words: list[str]) -> None:
    specification = pytest.importorskip("compose_spec").ComposeSpecification
    compose = yaml.safe_load(deploy(tmp_path, "compose", MODEL, *words)["compose.yaml"])
    specification(**compose)
    compose["services"]["quire"]["healthcheck"]["retries"] = {"no": "number"}
    with pytest.raises(Exception, match="retries"):
        specification(**compose)


def promql(expression: str) -> Any:
    """An expression as Prometheus' grammar has it, with Grafana's variables replaced."""
    parse = pytest.importorskip("promql_parser").parse
    return parse(re.sub(r"\$__(rate_)?interval|\$__range", "5m", expression))


@pytest.mark.parametrize("names", ["quire", "vllm"])
def test_prometheus_can_read_every_expression(tmp_path: Path, names: str) -> None:
    files = deploy(tmp_path, "prometheus", MODEL, "--metrics-names", names)
    board = json.loads(files["grafana/boards/quire.json"])
    expressions = [rule["expr"] for rule in yaml.safe_load(files["quire-alerts.yml"])["groups"][0]["rules"]]
    expressions += [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 40 and all(map(promql, expressions))
    with pytest.raises(ValueError, match="parenthesis"):
        promql(f"sum({expressions[0]}")


@pytest.mark.parametrize("words", [HARD, ["--device", "cpu"], ["--tensor-parallel-size", "2"]])
def test_docker_takes_the_file(tmp_path: Path, words: list[str]) -> None:
    command = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("hadolint is not installed")
    deploy(tmp_path, "docker", MODEL, *words)
    # DL3013 wants a version behind `pip install`: it stands in the argument QUIRE.
    check = [command, "--no-color", "--ignore", "DL3013", str(tmp_path / "Dockerfile")]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    (tmp_path / "Dockerfile").write_text("FROM python:3.12\nRUNN true\n")
    assert subprocess.run(check, capture_output=True, timeout=60, check=False).returncode != 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    deploy(tmp_path, "systemd", MODEL, *HARD)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "quire.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "quire.service" not in done.stderr, done.stderr


def test_words_of_a_unit_are_read_back_as_they_were() -> None:
    for word in ("plain", "", "two words", "50%", "$HOME", 'a "quote"', "back\\slash", "it's", '{"a": 1}'):
        assert shlex.split(quoted(word).replace("%%", "%").replace("$$", "$")) == [word]
