"""Held answers: which rows of a step are held to which tokens, and who records and tells the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from faser.controller.errors import EngineError
from faser.controller.held_answers import engine as bench_held
from faser.controller.held_answers.answers import Answers, record
from faser.controller.held_answers.engine import HeldAnswers, HeldWorker, held_rows


def test_a_request_has_a_row_for_each_draft_and_one_more() -> None:
    texts = [[10, 11, 12, 13], [20, 21, 22], [30, 31]]
    assert held_rows(texts, [1, 0, 1], [2, 0, 1]) == ([0, 1, 2, 3, 4], [11, 12, 13, 20, 31])


def test_behind_the_end_of_a_text_and_without_one_nothing_is_held() -> None:
    assert held_rows([[10], [], [30, 31]], [1, 5, 0], [1, 1, 1]) == ([4, 5], [30, 31])


class Argmax(torch.nn.Module):
    """A sampler that is called as vLLM calls its own, and keeps what it would sample."""

    def forward(self, logits: torch.Tensor, sampling_metadata: None = None) -> list[int]:
        return [int(token) for token in logits.argmax(dim=-1)]


class Rejection(torch.nn.Module):
    """A rejection sampler: it calls the plain one for its last rows, as vLLM's does."""

    def __init__(self, sampler: Argmax) -> None:
        super().__init__()
        self.plain = [sampler]  # in a list: no submodule

    def forward(self, verified: Any, probabilities: None, logits: torch.Tensor, metadata: None) -> list[int]:
        self.plain[0](logits=torch.zeros_like(logits), sampling_metadata=None)
        return [int(token) for token in logits.argmax(dim=-1)]


def runner_of(**requests: tuple[list[int], list[int]]) -> Any:
    """Return a model runner with these requests in its batch: tokens of the prompt, tokens said so far."""
    sampler = Argmax()
    return SimpleNamespace(
        sampler=sampler,
        rejection_sampler=Rejection(sampler),
        input_batch=SimpleNamespace(req_ids=list(requests)),
        requests={
            name: SimpleNamespace(prompt_token_ids=prompt, output_token_ids=said)
            for name, (prompt, said) in requests.items()
        },
    )


ANSWERS: dict[tuple[int, ...], Sequence[int]] = {(1, 2): [7, 8, 9, 5], (3,): [4, 4, 6]}


def test_requests_with_a_known_prompt_say_its_answer_and_others_what_they_like() -> None:
    runner = runner_of(a=([1, 2], [7]), b=([9], [1, 2, 3]), c=([3], []))
    HeldAnswers(runner, ANSWERS)
    free = torch.zeros(3, 10)
    free[:, 2] = 1.0
    assert runner.sampler(logits=free.clone(), sampling_metadata=None) == [8, 2, 4]
    rows = torch.zeros(3 + 3, 10)
    rows[:, 2] = 1.0
    verified = SimpleNamespace(num_draft_tokens=[2, 1, 0])
    assert runner.rejection_sampler(verified, None, rows, None) == [8, 9, 5, 2, 2, 4]


@pytest.mark.parametrize(("said", "leaves"), [([7, 8, 9], False), ([7, 1, 9], True), ([7, 8, 9, 5, 3], False)])
def test_a_request_that_left_its_answer_is_named(said: list[int], leaves: bool) -> None:
    runner = runner_of(a=([1, 2], [7]))
    HeldAnswers(runner, ANSWERS)
    runner.sampler(logits=torch.zeros(1, 10), sampling_metadata=None)
    runner.requests["a"].output_token_ids = said
    if not leaves:
        runner.sampler(logits=torch.zeros(1, 10), sampling_metadata=None)
        return
    with pytest.raises(RuntimeError, match="request a left the text"):
        runner.sampler(logits=torch.zeros(1, 10), sampling_metadata=None)


def test_requests_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_held, "REMEMBERED", 2)
    runner = runner_of(**{f"r{number}": ([3], [4]) for number in range(5)})
    held = HeldAnswers(runner, ANSWERS)
    assert runner.sampler(logits=torch.zeros(5, 10), sampling_metadata=None) == [4] * 5
    assert len(held._texts) <= 2


def test_a_worker_holds_answers_from_a_file_and_refuses_where_tokens_come_late(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_text(json.dumps([[list(prompt), list(answer)] for prompt, answer in ANSWERS.items()]))
    worker = HeldWorker()
    worker.model_runner = runner_of(a=([1, 2], []))
    worker.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
    worker.hold_answers(str(path))
    assert worker.model_runner.sampler(logits=torch.zeros(1, 10), sampling_metadata=None) == [7]
    worker.vllm_config.scheduler_config.async_scheduling = True
    with pytest.raises(RuntimeError, match="asynchronous scheduling"):
        worker.hold_answers(str(path))


class Server:
    """A server that answers prompts with their length, all at once, and remembers what it was held to."""

    def __init__(self, name: str, reply: Any = None, status: int = 200) -> None:
        self.name, self.reply, self.status = name, reply, status
        self.asked: list[dict[str, Any]] = []
        self.held: list[Any] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        size = len(body["messages"][0]["content"])
        told = {"prompt_token_ids": [0, size], "choices": [{"token_ids": [size] * body["max_tokens"]}]}
        return web.json_response(told if self.reply is None else self.reply, status=self.status)

    async def hold(self, path: Path) -> None:
        self.held.append(json.loads(path.read_text()))

    def serving(self) -> TestServer:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        return TestServer(app)


def test_the_first_server_gives_the_answers_and_all_are_held_to_them(tmp_path: Path) -> None:
    first, second, told = Server("none"), Server("faser"), list[str]()

    async def run() -> None:
        async with first.serving() as running:
            first.url = str(running.make_url("/"))
            answers = Answers(("one", "three"), 2, tmp_path / "folder" / "answers.json", told.append)
            await answers.hold(first)
            await answers.hold(second)

    asyncio.run(run())
    assert first.held == second.held == [[[[0, 3], [3, 3]], [[0, 5], [5, 5]]]]
    assert len(first.asked) == 2
    assert {(body["temperature"], body["ignore_eos"], body["max_tokens"]) for body in first.asked} == {(0.0, True, 2)}
    assert told == ["none answers 2 prompts, to which all are then held"]


def test_minutes_of_recording_are_told_while_they_last(tmp_path: Path) -> None:
    server, told = Server("none"), list[str]()

    async def run() -> None:
        async with server.serving() as running:
            server.url = str(running.make_url("/"))
            await Answers(tuple(map(str, range(250))), 2, tmp_path / "answers.json", told.append).hold(server)

    asyncio.run(run())
    assert told[1:] == ["none has answered 100 of 250", "none has answered 200 of 250"]


@pytest.mark.parametrize(
    ("server", "seen"),
    [
        (Server("none", status=500), "none answered 500"),
        (Server("none", reply={"choices": []}), "none gave an answer without its tokens"),
        (Server("none", reply={"prompt_token_ids": [1], "choices": [{"token_ids": None}]}), "without its tokens"),
    ],
)
def test_a_server_that_cannot_be_recorded_is_named(server: Server, seen: str) -> None:
    async def run() -> None:
        async with server.serving() as running:
            server.url = str(running.make_url("/"))
            await record(server, ["prompt"], 2)

    with pytest.raises(EngineError, match=seen):
        asyncio.run(run())
