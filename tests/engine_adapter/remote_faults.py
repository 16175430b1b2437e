"""What engine_child.py does to a drafter process: which one is started, and what becomes of it in mid-flight."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faser.engine_adapter.drafter_process import process as drafter_process
from faser.engine_adapter.drafter_process.process import DrafterProcess
from faser.engine_adapter.overlap import frontier_runner as runner_frontier
from faser.engine_adapter.overlap import ping_pong, remote_drafting, splits

KNOWN = Path(__file__).with_name("known_drafter.py")
LIMIT_S = 60.0
COMPARED: list[dict[str, Any]] = []  # of the newest batch: what the process and vLLM's own drafter drafted for a row


def install(given: dict[str, Any]) -> None:
    """Let the runner start a process: known_drafter.py with the file `texts`; without one, the draft model's own."""
    if not os.environ.get("FASER_SPLITS"):
        os.environ["FASER_DRAFTER_CORES"] = "all"
    os.environ["FASER_DRAFT_AHEAD"] = "always"
    drafter_process.FIRST_PAUSE_S = 0.01  # type: ignore[misc]
    # Whether an answer comes in time shall not depend on the machine's other work.
    remote_drafting.SMOOTHING, remote_drafting.FIRST_GUESS_S = 0.0, LIMIT_S  # type: ignore[misc]
    if "texts" in given:
        command = [sys.executable, str(KNOWN), given["texts"]]
        for module in (runner_frontier, ping_pong, splits):
            module.chosen_drafter = lambda cores, config: (command, None)  # type: ignore[attr-defined]


def begin(runner: Any, batch: dict[str, Any], done: list[dict[str, Any]]) -> None:
    """Wait until the process can take jobs, and arrange for what shall happen to it in this batch.

    `known`: a new known_drafter.py, which knows what was said in the first batch, or in that of number `said`, and has
    this fault. `both`: vLLM's own drafter drafts too, wherever the process does, and nothing is drafted ahead.
    """
    remote = runner.remote
    COMPARED.clear()
    for name in ("draft_remotely", "hand_over"):
        vars(runner).pop(name, None)
    vars(remote).pop("go_on", None)
    if batch.get("both"):
        _draft_twice(runner, remote)
    if "known" in batch:
        file = Path(remote.process._command[-1])
        tokens = done[batch["known"].get("said", 0)]["tokens"]
        texts = [prompt + said[0] for prompt, said in zip(batch["prompts"], tokens, strict=True)]
        file.write_text(json.dumps({"texts": texts, "wrong": 0.0} | batch["known"]))
        remote.process.close()
        remote.process = DrafterProcess(remote.process._command)
    _wait(remote.process)
    kills, steps = list(batch.get("kill_at", [])), 0

    def begin_step() -> None:
        nonlocal steps
        steps += 1
        if kills and steps >= kills[0] and remote.process.pid is not None:
            kills.pop(0)
            os.kill(remote.process.pid, signal.SIGKILL)
        elif batch.get("is_back_at") == steps:
            _wait(remote.process)
        type(remote).begin_step(remote)

    remote.begin_step = begin_step


@contextmanager
def aborted(llm: Any, at: dict[str, list[int]]) -> Iterator[None]:
    """Abort requests in front of engine steps: `at` has the numbers of the live requests, oldest first, by step."""
    engine, steps = llm.llm_engine, itertools.count(1)

    def step() -> Any:
        live = sorted(engine.output_processor.external_req_ids, key=int)
        engine.abort_request([live[index] for index in at.get(str(next(steps)), [])])
        return type(engine).step(engine)

    engine.step = step
    try:
        yield
    finally:
        del engine.step


def _draft_twice(runner: Any, remote: Any) -> None:
    whole = type(runner)

    def draft_remotely(sampled: Any, lengths: list[int] | None) -> None:
        asked = list(lengths or [])
        whole.draft_remotely(runner, sampled, lengths)
        if lengths is not None:
            lengths[:] = asked

    def hand_over(drafts: Any, drafted: list[int]) -> Any:
        for row, found in remote.drafted.items():
            own = drafts[row][: drafted[row]].tolist()
            if own:  # else vLLM's drafter is still catching up
                COMPARED.append({"process": list(found.tokens), "vllm": own})
        return whole.hand_over(runner, drafts, drafted)

    runner.draft_remotely, runner.hand_over = draft_remotely, hand_over
    remote.go_on = lambda wishes, requests: None


def _wait(process: DrafterProcess) -> None:
    ends = time.monotonic() + LIMIT_S
    while not process.is_ready and time.monotonic() < ends:
        process.look()
        process.collect(0.01)
    assert process.is_ready, "the drafter's process did not start"
