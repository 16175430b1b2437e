"""What stands under deploy/ agrees with the code: metric names, settings, paths, probes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import faser
from faser.controller.cli.main import app
from faser.controller.config import settings
from faser.controller.config_layers import OTHER_VARIABLES, load
from faser.controller.daemon.metrics import METRICS
from faser.controller.daemon.web import OPEN_PATHS
from faser.controller.engine.launch import SCHEDULER_CLASS, WORKER_CLASS
from faser.controller.fleet.fleet_metrics import FLEET_METRICS
from faser.controller.fleet.front import OWN
from faser.controller.fleet.options import FleetOptions, size_rule
from faser.controller.fleet.placement import place
from faser.controller.home import config_file

DEPLOY = Path(faser.__file__).parent / "deploy"
OPERATIONS = DEPLOY.parent / "docs" / "guide" / "operations.md"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana").glob("*.json"))}
ALERTS = yaml.safe_load((DEPLOY / "kubernetes" / "alerts.yaml").read_text())
KNOWN: dict[str, Any] = {figure.name: figure for figure in (*METRICS, *FLEET_METRICS)}


def expressions() -> list[str]:
    boards = DASHBOARDS.values()
    panels = [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]
    variables = [entry["query"] for board in boards for entry in board["templating"]["list"]]
    rules = [rule["expr"] for group in ALERTS["spec"]["groups"] for rule in group["rules"]]
    return [*panels, *variables, *rules]


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_names_metrics_labels_and_values_that_exist(expression: str) -> None:
    assert set(re.findall(r"faser_\w+", expression)) <= set(KNOWN)
    for name, matchers in re.findall(r"(faser_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)=~?", matchers)) <= set(KNOWN[name].labels), expression
    for name in re.findall(r"(?:rate|increase)\((faser_\w+)", expression):
        assert name.endswith("_total"), f"rate of a gauge: {expression}"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_dashboards_legends_use_labels_that_the_metric_has(name: str) -> None:
    panels = DASHBOARDS[name]["panels"]
    for panel in panels:
        for target in panel["targets"]:
            labels = {label for each in re.findall(r"faser_\w+", target["expr"]) for label in KNOWN[each].labels}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)


def test_the_fleets_dashboard_shows_all_of_its_metrics() -> None:
    shown = json.dumps(DASHBOARDS["fleet"])
    assert all(figure.name in shown for figure in FLEET_METRICS)
    assert DASHBOARDS["fleet"]["uid"] != DASHBOARDS["faser"]["uid"]


def test_every_alert_has_a_runbook_section() -> None:
    sections = {line[4:].strip().lower() for line in OPERATIONS.read_text().splitlines() if line.startswith("### ")}
    for group in ALERTS["spec"]["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["runbook"] == f"docs/guide/operations.md#{rule['alert'].lower()}"
            assert rule["alert"].lower() in sections


def test_every_setting_that_is_named_exists_and_is_taken() -> None:
    known = {setting.variable for setting in settings().values()} | set(OTHER_VARIABLES)
    for path in (p for p in DEPLOY.rglob("*") if p.is_file()):
        named = set(re.findall(r"\bFASER_[A-Z_]+\b", path.read_text())) - {"FASER_UID"}
        assert named <= known, path
    unit = dict(re.findall(r"^Environment=(FASER_\w+)=(.*)$", (DEPLOY / "faser.service").read_text(), re.M))
    assert load(Path("/dev/null"), unit).config.log.format == "json"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def test_the_sidecar_is_native_probed_and_shares_the_socket_with_the_engine() -> None:
    secret, deployment, clients, service = documents("sidecar.yaml")
    (monitor,) = documents("servicemonitor.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (sidecar,), (engine,) = pod["initContainers"], pod["containers"]
    assert sidecar["restartPolicy"] == "Always"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert sidecar[probe]["httpGet"]["path"] in OPEN_PATHS
    folder = {e["name"]: e["value"] for e in engine["env"]}["FASER_RUNTIME_DIR"]
    for container in (sidecar, engine):
        assert any(folder.startswith(mount["mountPath"]) for mount in container["volumeMounts"])
    assert {m["name"] for c in (sidecar, engine) for m in c["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert f"FASER_RUNTIME_DIR={folder}" in (DEPLOY / "Dockerfile").read_text()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    credentials = monitor["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert credentials["name"] == secret["metadata"]["name"]
    assert credentials["key"] in secret["stringData"]
    assert clients["spec"]["ports"][0]["targetPort"] in {port["name"] for port in engine["ports"]}
    values = {e["name"]: e["value"] for e in sidecar["env"]}
    assert load(Path("/dev/null"), values).config.mode.default == "advisory"


def test_the_engine_of_the_manifest_speculates_and_is_what_the_autoscaler_scales() -> None:
    _, deployment, *_ = documents("sidecar.yaml")
    (scaler,) = documents("autoscaler.yaml")
    (engine,) = deployment["spec"]["template"]["spec"]["containers"]
    given = dict(argument.lstrip("-").split("=", 1) for argument in engine["args"])
    assert (given["scheduler-cls"], given["worker-cls"]) == (SCHEDULER_CLASS, WORKER_CLASS)
    assert json.loads(given["speculative-config"])["num_speculative_tokens"] >= 1
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": 1}
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (deployment["kind"], deployment["metadata"]["name"])
    assert scaler["spec"]["maxReplicas"] >= 1000


def test_the_unit_notifies_reloads_and_is_confined() -> None:
    unit = (DEPLOY / "faser.service").read_text()
    for line in ("Type=notify", "WatchdogSec=10", "ExecReload=/bin/kill -HUP $MAINPID", "NoNewPrivileges=yes"):
        assert re.search(rf"^{re.escape(line)}$", unit, re.M)


def test_the_unit_starts_on_a_fresh_host_and_the_walk_leads_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unit = (DEPLOY / "faser.service").read_text()
    environment = dict(re.findall(r"^Environment=(\w+)=(.*)$", unit, re.M))
    monkeypatch.setenv("XDG_CONFIG_HOME", environment["XDG_CONFIG_HOME"])
    assert config_file() == Path("/etc/faser/config.toml")
    (command,) = re.findall(r"^ExecStart=(\S+) (.*)$", unit, re.M)
    assert command == ("/opt/faser/bin/faser", "sidecar"), "a file named with --config has to exist"
    walk = OPERATIONS.read_text()
    assert f"FASER_RUNTIME_DIR={environment['FASER_RUNTIME_DIR']}" in walk
    assert f"-m venv {Path(command[0]).parents[1]}" in walk
    (content,) = re.findall(r"printf '(.*)' > /etc/faser/config.toml", walk)
    (tmp_path / "config.toml").write_text(content.replace("\\n", "\n"))
    config = load(tmp_path / "config.toml").config
    assert config.mode.default == "advisory", "nothing steers before the operator says so"
    assert f"curl -s http://{config.http.listen}/metrics" in walk


def test_the_ray_file_names_the_two_classes_and_no_other_way_of_switching_on() -> None:
    (application,) = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())["applications"]
    (model,) = application["args"]["llm_configs"]
    assert model["engine_kwargs"]["scheduler_cls"] == SCHEDULER_CLASS
    assert model["engine_kwargs"]["worker_cls"] == WORKER_CLASS
    assert model["engine_kwargs"]["speculative_config"]["num_speculative_tokens"] >= 1
    assert "data_parallel_size" not in model["engine_kwargs"]


def options_of(command: str) -> set[str]:
    """Return the options of one of our commands."""
    return {name for each in get_command(app).commands[command].params for name in each.opts}  # type: ignore[attr-defined]


def test_the_fleets_entry_point_finds_its_cluster_and_is_asked_what_it_answers() -> None:
    cluster, entry, service, policy = documents("fleet.yaml")
    (container,) = entry["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["faser", "fleet"]
    given = dict(argument.split("=", 1) for argument in container["args"])
    assert set(given) - {"--speculative-config"} <= options_of("fleet")
    name = cluster["metadata"]["name"]
    ports = {port["name"]: port["containerPort"] for port in _containers(cluster["spec"]["headGroupSpec"])[0]["ports"]}
    assert given["--address"] == f"ray://{name}-head-svc:{ports['client']}"
    assert int(given["--port"]) == container["ports"][0]["containerPort"]
    rule = size_rule(FleetOptions("m", replicas=given["--replicas"]))
    assert rule.most == cluster["spec"]["workerGroupSpecs"][0]["maxReplicas"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in OWN
    labels = entry["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    admitted = [source["podSelector"]["matchLabels"] for source in policy["spec"]["ingress"][0]["from"]]
    assert labels in admitted
    assert policy["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": name}
    environment = {each["name"]: each for each in container["env"]}
    assert environment["RAY_AUTH_MODE"]["value"] == cluster["spec"]["authOptions"]["mode"] == "token"
    assert environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == name


def _containers(group: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = group["template"]["spec"]["containers"]
    return found


def test_a_worker_of_the_fleet_has_room_for_one_engine_and_a_sidecar_of_its_own() -> None:
    cluster, entry, *_ = documents("fleet.yaml")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (sidecar,), (engine,) = pod["initContainers"], pod["containers"]
    arguments = entry["spec"]["template"]["spec"]["containers"][0]["args"]
    assert place(arguments, is_cpu=False, cores=1).gpus == engine["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert (cluster["spec"]["enableInTreeAutoscaling"], group["minReplicas"]) == (True, 0)
    assert sidecar["restartPolicy"] == "Always"
    folder = {each["name"]: each["value"] for each in engine["env"]}["FASER_RUNTIME_DIR"]
    assert f"FASER_RUNTIME_DIR={folder}" in (DEPLOY / "Dockerfile").read_text(), "the sidecar's image has the same"
    for container in (sidecar, engine):
        assert any(folder.startswith(mount["mountPath"]) for mount in container["volumeMounts"])
    assert {m["name"] for c in (sidecar, engine) for m in c["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_the_file_for_rays_launcher_is_one_and_starts_ray_as_the_fleet_wants_it() -> None:
    ray = pytest.importorskip("ray")
    jsonschema = pytest.importorskip("jsonschema")
    text = (DEPLOY / "ray" / "fleet.yaml").read_text()
    cluster = yaml.safe_load(text)
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)
    assert len(cluster["provider"]["worker_ips"]) == cluster["max_workers"]
    unit = dict(re.findall(r"^Environment=(FASER_RUNTIME_DIR)=(.*)$", (DEPLOY / "faser.service").read_text(), re.M))
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = cluster[commands][-1]
        for wanted in ("RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0", "RAY_worker_niceness=0"):
            assert wanted in start
        assert f"FASER_RUNTIME_DIR={unit['FASER_RUNTIME_DIR']}" in start
    (command,) = re.findall(r"^# +faser fleet (.*)$", text, re.M)
    named = set(re.findall(r"--[a-z-]+", command))
    assert named - {"--speculative-config"} <= options_of("fleet")
