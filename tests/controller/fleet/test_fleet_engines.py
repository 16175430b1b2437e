"""A fleet as a user has it: `faser fleet`, Ray, two real engines on a core each, one sidecar."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest

import faser
from faser.controller.engine.launch import free_port
from faser.controller.engine.reaper import descendants
from faser.controller.link.ask import ask as ask_sidecar

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.alone,
    pytest.mark.timeout(420),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines want a core each"),
]
BENCHMARKS = Path(faser.__file__).parent / "benchmarks"
PROMPTS = ("The sea is a", "The sun is a", "The wind is a", "The tree is a")


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    """Return benchmarks/fleet_process.py."""
    spec = importlib.util.spec_from_file_location("fleet_process", BENCHMARKS / "fleet_process.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fleet(driver: ModuleType) -> Iterator[Any]:
    """Return a fleet whose two engines serve."""
    with tempfile.TemporaryDirectory(prefix="faser-") as name:
        options = ["--replicas", "2", "--cores-per-replica", "1", "--dtype", "float32"]
        with driver.FleetProcess(Path(name), options) as running:
            running.wait_serving(2)
            yield running


def clients(body: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    """Run clients."""

    async def main() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=2.0)) as session:
            await body(session)

    asyncio.run(main())


def generated(driver: Any, replica: dict[str, Any]) -> float:
    """Return how many tokens vLLM has generated, by its own count."""
    lines = driver.get(f"{replica['url']}/metrics").decode().splitlines()
    names = ("vllm:generation_tokens_total{",)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


async def until(probe: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + 30.0
    while not await asyncio.to_thread(probe):
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.05)


def test_both_engines_answer_alike_on_cores_of_their_own_and_one_sidecar_steers_both(fleet: Any, driver: Any) -> None:
    replicas = fleet.replicas()
    assert {each["where"].rpartition(" ")[2] for each in replicas} == {
        str(core) for core in sorted(os.sched_getaffinity(0))[:2]
    }

    async def body(session: aiohttp.ClientSession) -> None:
        alone = [await driver.ask(session, replicas[0]["url"], prompt, 24) for prompt in PROMPTS]
        other = [await driver.ask(session, replicas[1]["url"], prompt, 24) for prompt in PROMPTS]
        through = await asyncio.gather(*(driver.ask(session, fleet.url, prompt, 24) for prompt in PROMPTS))
        assert [each.text for each in through] == [each.text for each in other] == [each.text for each in alone]
        assert all(len(each.text) > 20 for each in alone)
        assert {each.replica for each in through} == {"replica-1", "replica-2"}
        assert min(each.events for each in through) > 3, "they came as streams"

    clients(body)
    engines = ask_sidecar(fleet.link).engines
    assert len(engines) == 2
    assert all(engine.decisions > 0 and engine.lease_share > 0.0 for engine in engines)


def test_a_client_that_leaves_frees_the_engine(fleet: Any, driver: Any) -> None:
    def tokens() -> float:
        return sum(generated(driver, each) for each in fleet.replicas())

    async def body(session: aiohttp.ClientSession) -> None:
        begun = tokens()
        asked = asyncio.create_task(driver.ask(session, fleet.url, PROMPTS[0], 1500))
        await until(lambda: tokens() > begun + 20, "it runs")
        asked.cancel()
        await asyncio.sleep(1.0)
        left = await asyncio.to_thread(tokens)
        await asyncio.sleep(2.0)
        assert await asyncio.to_thread(tokens) == left < begun + 1500

    clients(body)
    assert fleet.status()["requests"]["cancelled"] == 1
    assert [each["requests"] for each in fleet.replicas()] == [0, 0]


def test_of_a_killed_engine_one_stream_ends_with_one_error_and_what_had_not_begun_is_answered(
    fleet: Any, driver: Any
) -> None:
    """Then another engine takes its place; meanwhile the one that is left serves."""

    async def body(session: aiohttp.ClientSession) -> None:
        expected = (await driver.ask(session, fleet.url, PROMPTS[1], 24)).text
        streams = [asyncio.create_task(driver.ask(session, fleet.url, PROMPTS[0], 160)) for _ in range(2)]
        await until(lambda: [each["requests"] for each in fleet.replicas()] == [1, 1], "a stream each")
        await asyncio.sleep(2.0)
        victim = fleet.replicas()[0]
        core = fleet.core_of(victim)
        os.kill(core, signal.SIGSTOP)  # what comes to it now does not begin
        waiting = [asyncio.create_task(driver.ask(session, fleet.url, PROMPTS[1], 24)) for _ in range(2)]
        await until(lambda: fleet.replicas()[0]["requests"] == 2, "one of them is at the victim")
        os.kill(core, signal.SIGKILL)
        answered = await asyncio.gather(*waiting)
        assert [(each.text, each.error) for each in answered] == [(expected, "")] * 2
        ended = await asyncio.gather(*streams)
        assert sorted(bool(each.error) for each in ended) == [False, True]
        assert all(each.has_begun for each in ended)
        assert fleet.status()["requests"]["retried"] == 1
        assert fleet.status()["changes"]["lost"] == 1
        assert (await driver.ask(session, fleet.url, PROMPTS[1], 24)).text == expected

    clients(body)
    assert len(fleet.status()["replicas"]) == 2, "another one starts"


def test_ctrl_c_ends_everything_even_while_an_engine_starts(fleet: Any) -> None:
    roots = [each["pid"] for each in fleet.status()["replicas"] if each["pid"]]
    trees = [pid for root in roots for pid in (root, *descendants(root))]
    assert len(trees) > 4
    assert fleet.signal(signal.SIGINT) == 130
    assert "Traceback" not in fleet.log.read_text()
    end_s = time.monotonic() + 60.0  # one that is amid its imports takes its grace period
    while left := [pid for pid in trees if Path(f"/proc/{pid}").exists()] or fleet.left():
        assert time.monotonic() < end_s, left
        time.sleep(0.1)


# --- what is told of an engine that does not start ---


@pytest.mark.slow  # `make proof`; test_fleet.py and test_fleet_cli.py have the parts
def test_an_engine_that_does_not_start_is_told_with_its_own_words() -> None:
    command = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()", "fleet", "embedded"]
    with tempfile.TemporaryDirectory(prefix="faser-") as name:
        Path(name).chmod(0o700)
        environment = {**os.environ, "FASER_RUNTIME_DIR": name, "FASER_STORE": f"{name}/t.sqlite"}
        done = subprocess.run(
            [*command, "--replicas", "1", "--port", str(free_port()), "--max-num-seqs", "0"],
            capture_output=True, text=True, cwd="/", env=environment, timeout=240,
        )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 5
    assert last.startswith("faser: replica-1 did not start: vLLM ended with code ")
    assert "ValidationError" in last
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # `make proof`
@pytest.mark.timeout(900)
def test_no_request_fails_while_replicas_are_added_and_merged(tmp_path: Path) -> None:
    out = tmp_path / "replicas.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "replicas.py"), "--out", str(out)], capture_output=True, text=True, cwd="/"
    )
    assert out.is_file(), done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert (found["added"]["failed"], found["merged"]["failed"]) == (0, 0)
    assert min(found["added"]["answers"], found["merged"]["answers"]) >= 1
    assert found["killed"]["failed"] <= 4, "only what had begun there"
    assert found["killed"]["failed_before_begun"] == 0
    assert [found[part]["different"] for part in ("added", "killed", "merged")] == [0, 0, 0]
    assert found["changes"]["added"] == 3
    assert found["changes"]["merged"] >= 1
    assert found["left"] == []
    assert done.returncode == 0, done.stderr[-3000:]
