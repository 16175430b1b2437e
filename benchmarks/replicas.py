"""What a fleet of two engines costs and loses on this machine: `python benchmarks/replicas.py`, six minutes.

`faser fleet embedded --replicas 1:2`, an engine on a core each, in float32. First one engine alone, asked directly and
through the entry point in turns: what the entry point costs a request. Then eight clients stream one answer after the
other, which adds the second engine; once both serve, the second one's core is killed; its successor is waited for; then
one client is left, and an engine is merged away while it streams. Every answer is compared with the one that the first
engine gave alone. `benchmarks/results/replicas.json` is one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from fleet_process import FleetProcess, Streamed, ask

from faser.controller.engine.machine import provenance
from faser.controller.errors import FaserError
from faser.controller.whole_file import replacing
from faser.models.embedded.pair import TARGET_NAME

RESULT: Final = Path(__file__).resolve().parent / "results" / "replicas.json"
OPTIONS: Final = (
    "--replicas", "1:2", "--cores-per-replica", "1", "--requests-per-replica", "4", "--idle-s", "5",
    "--dtype", "float32",
)  # fmt: skip
PROMPTS: Final = tuple(f"The {what} is a" for what in ("sea", "sun", "moon", "wind", "rain", "tree", "bird", "fish"))
TOKENS: Final = 48
PAIRS: Final = 60
STREAM_PAIRS: Final = 10
SETTLED_S: Final = 15.0


@dataclass
class Clients:
    """Clients that each stream one answer after the other until told to stop."""

    url: str
    session: aiohttp.ClientSession
    answers: list[tuple[str, Streamed]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_over: bool = False

    def start(self, count: int) -> None:
        """Begin so many."""
        self.tasks = [asyncio.create_task(self._go_on(number)) for number in range(count)]

    async def leave(self, count: int) -> None:
        """Let all but so many finish what they have and stop."""
        self.is_over = True
        await asyncio.gather(*self.tasks)
        self.is_over = False
        self.start(count)

    async def stop(self) -> None:
        """Let all finish."""
        self.is_over = True
        await asyncio.gather(*self.tasks)

    async def _go_on(self, number: int) -> None:
        turn = number
        while not self.is_over:
            prompt = PROMPTS[turn % len(PROMPTS)]
            self.answers.append((prompt, await ask(self.session, self.url, prompt, TOKENS)))
            turn += 1

    def tally(self, since: int, expected: dict[str, str]) -> dict[str, Any]:
        """Return what came of the answers from a place on."""
        part = self.answers[since:]
        failed = [answer for _, answer in part if answer.error]
        whole = [(prompt, answer) for prompt, answer in part if not answer.error]
        return {
            "answers": len(part),
            "failed": len(failed),
            "failed_before_begun": sum(not answer.has_begun for answer in failed),
            "errors": sorted({answer.error for answer in failed}),
            "different": sum(answer.text != expected[prompt] for prompt, answer in whole),
        }


async def in_turns(
    pairs: int, direct: Callable[[], Awaitable[None]], through: Callable[[], Awaitable[None]]
) -> dict[str, float]:
    """Return medians in ms of both ways and of their difference, the two taking turns."""
    found: list[tuple[float, float]] = []
    for pair in range(pairs):
        ways = [direct, through] if pair % 2 else [through, direct]
        spent = {}
        for way in ways:
            begun_s = time.perf_counter()
            await way()
            spent[way is direct] = 1e3 * (time.perf_counter() - begun_s)
        found.append((spent[True], spent[False]))
    return {
        "direct_ms": round(statistics.median(one for one, _ in found), 2),
        "through_ms": round(statistics.median(two for _, two in found), 2),
        "difference_ms": round(statistics.median(two - one for one, two in found), 2),
    }


async def overhead(session: aiohttp.ClientSession, direct: str, through: str) -> dict[str, Any]:
    """Return what the entry point adds to a request without an engine, of one token, and to a stream."""

    def version(url: str) -> Callable[[], Awaitable[None]]:
        async def go() -> None:
            async with session.get(f"{url}/version") as response:
                await response.read()

        return go

    def token(url: str) -> Callable[[], Awaitable[None]]:
        async def go() -> None:
            body = {"model": TARGET_NAME, "prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0.0}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.read()

        return go

    def stream(url: str) -> Callable[[], Awaitable[None]]:
        async def go() -> None:
            await ask(session, url, PROMPTS[1], TOKENS)

        return go

    return {
        "version": await in_turns(PAIRS, version(direct), version(through)),
        "one_token": await in_turns(PAIRS, token(direct), token(through)),
        f"stream_of_{TOKENS}": await in_turns(STREAM_PAIRS, stream(direct), stream(through)),
    }


async def waited(call: Callable[[], Any]) -> Any:
    """Return what a blocking call returns, while clients go on."""
    return await asyncio.get_running_loop().run_in_executor(None, call)


async def measure(fleet: FleetProcess) -> dict[str, Any]:
    """Return all figures of one run."""
    found: dict[str, Any] = {}
    await waited(lambda: fleet.wait_serving(1))
    found["first_start_s"] = round(fleet.status()["changes"]["start_s"], 1)
    (first,) = fleet.replicas()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(keepalive_timeout=2.0)) as session:
        expected = {prompt: (await ask(session, first["url"], prompt, TOKENS)).text for prompt in PROMPTS}
        found["entry_point"] = await overhead(session, first["url"], fleet.url)
        clients = Clients(fleet.url, session)
        clients.start(len(PROMPTS))
        await waited(lambda: fleet.wait_serving(2))
        found["added_start_s"] = round(fleet.status()["changes"]["start_s"], 1)
        await asyncio.sleep(SETTLED_S)
        found["added"] = clients.tally(0, expected)
        since = len(clients.answers)
        second = fleet.replicas()[1]
        os.kill(fleet.core_of(second), signal.SIGKILL)
        await waited(lambda: fleet.wait_until(lambda: fleet.status()["changes"]["lost"], 30.0, "the loss is seen"))
        await waited(lambda: fleet.wait_serving(2))
        found["killed"] = clients.tally(since, expected) | {"retried": fleet.status()["requests"]["retried"]}
        await clients.leave(1)
        since = len(clients.answers)
        found["merge_s"] = round(await waited(lambda: fleet.wait_until(
            lambda: fleet.status()["changes"]["merged"], 60.0, "one is merged away"
        )), 1)  # fmt: skip
        await clients.stop()
        found["merged"] = clients.tally(since, expected)
        found["requests"] = fleet.status()["requests"]
        found["changes"] = fleet.status()["changes"]
    return found


def main() -> int:
    """Measure and write; return 1 if a request failed through scaling."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT, help="where the figures go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faser-") as name:
        fleet = FleetProcess(Path(name), OPTIONS)
        try:
            found = asyncio.run(measure(fleet))
        finally:
            begun_s = time.monotonic()
            code = fleet.stop()
        found |= {"stop_s": round(time.monotonic() - begun_s, 1), "exit_code": code, "left": fleet.left()}
    found |= provenance()
    with replacing(options.out) as place:
        place.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return int(bool(found["added"]["failed"] or found["merged"]["failed"] or found["left"]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FaserError as error:
        sys.exit(f"replicas.py: {error}")
