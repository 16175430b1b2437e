"""Verified, accepted and emitted tokens in the telemetry are vLLM's own, at every odd end of a request, on a server."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from faser.controller.engine.launch import free_port
from faser.controller.telemetry.packing import unpack_rows
from faser.controller.telemetry.schema import STOP_OR_ABORT
from faser.models.embedded.pair import ensure_embedded_pair

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODEL = "SmolLM2-135M-Instruct"
REQUESTS = 60
PROMPTS = (
    "Repeat after me: red green blue red green blue red green blue red green blue red green blue red green",
    "Count from one to twenty in words: one, two, three,",
    "A list of fruits: apple, banana, cherry, apple, banana, cherry, apple,",
    "Question: What is the capital of France?\nAnswer:",
)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}


@dataclass
class Answer:
    """What one client got: `told` is None where it left."""

    kind: str
    told: dict[str, Any] | None
    request_id: str = ""


class Server:
    """`faser serve embedded`, and what vLLM and FASER say of it."""

    def __init__(self, port: int, store: Path) -> None:
        self.port = port
        self.store = store

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            json.dumps({"model": MODEL, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def leave(self, **body: Any) -> str:
        """Ask for a stream, take two pieces of it and go; return the request's id."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=300)
        content = json.dumps({"model": MODEL, "stream": True, **body})
        connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        pieces = [line for line in (answer.readline() for _ in range(3)) if line.startswith(b"data: {")]
        connection.close()
        request_id: str = json.loads(pieces[0].removeprefix(b"data: "))["id"]
        return request_id

    def vllms(self) -> dict[str, int]:
        """Return vLLM's own counters."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()

        def total(name: str) -> int:
            return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}")))

        return {
            "verified": total("spec_decode_num_draft_tokens_total"),
            "accepted": total("spec_decode_num_accepted_tokens_total"),
            "emitted": total("generation_tokens_total"),
        }

    def fasers(self) -> tuple[Counter[str], dict[str, Counter[str]], dict[str, tuple[str, str | None, int]], int]:
        """Return FASER's counts, by request too, each request's (end, detail, tokens), and the miscount told."""
        sums: Counter[str] = Counter()
        requests: dict[int, Counter[str]] = {}
        with sqlite3.connect(f"file:{self.store}?mode=ro", uri=True) as store:
            for (rows,) in store.execute("SELECT rows FROM steps"):
                for row in unpack_rows(rows):
                    own = Counter(verified=row.verified, accepted=row.accepted, emitted=row.emitted)
                    sums += own
                    requests.setdefault(row.handle, Counter()).update(own)
            events = store.execute("SELECT kind, handle, request_id, detail, tokens FROM events").fetchall()
            apart = store.execute("SELECT max(miscounted) FROM steps").fetchone()[0]
        names = {handle: name for kind, handle, name, _, _ in events if kind == "arrival"}
        ends = {
            names[handle]: (kind, detail, tokens)
            for kind, handle, _, detail, tokens in events
            if kind in ("finish", "abort")
        }
        return sums, {names[handle]: own for handle, own in requests.items()}, ends, apart


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ensure_embedded_pair()
    folder, port = tmp_path_factory.mktemp("counts"), free_port()
    environment = os.environ | {
        "FASER_RUNTIME_DIR": str(folder / "run"), "FASER_STORE": str(folder / "t.sqlite"), "FASER_POLICY": "fixed:4",
        "FASER_GUARD_ENVELOPE_MARGIN": "1", "FASER_HTTP_LISTEN": f"127.0.0.1:{free_port()}",
    }  # fmt: skip
    command = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()"]
    options = ["--per-request-spec-decode-metrics", "detailed", "--enable-per-request-metrics", "--dtype", "float32"]
    serve = subprocess.Popen(
        [*command, "serve", "embedded", "--port", str(port), *options],
        env=environment, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert serve.stderr
        assert any("serving on" in line for line in iter(serve.stderr.readline, ""))
        yield Server(port, folder / "t.sqlite")
    finally:
        serve.send_signal(signal.SIGINT)
        serve.communicate()


def ask(server: Server, number: int, green: int) -> Answer:
    """Send one of ten kinds of requests."""
    chance = random.Random(number)
    kinds = (
        "plain",
        "stop token",
        "stop string",
        "short",
        "left",
        "three",
        "penalty",
        "grammar",
        "sampled",
        "end of turn",
    )
    kind = kinds[number % len(kinds)]
    body: dict[str, Any] = {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "temperature": 0,
        "max_tokens": chance.randint(20, 40),
    }
    if kind == "left":
        return Answer(kind, None, server.leave(**body | {"max_tokens": 1000, "ignore_eos": True}))
    body |= {
        "plain": {"ignore_eos": True},
        "stop token": {"prompt": PROMPTS[0], "stop_token_ids": [green], "min_tokens": 2 + number % 5},
        "stop string": {"prompt": PROMPTS[0], "stop": ["blue red"]},
        "short": {"max_tokens": 1 + chance.randrange(14), "ignore_eos": True},
        "three": {"n": 3, "temperature": 0.8, "seed": number},
        "penalty": {"presence_penalty": 0.6, "repetition_penalty": 1.1},
        "grammar": {"structured_outputs": {"json": SCHEMA}},
        "sampled": {"temperature": 0.7, "seed": number},
        "end of turn": {"max_tokens": 60},
    }[kind]
    said = server.post("v1/completions", **body)
    return Answer(kind, said, said["id"])


@pytest.fixture(scope="module")
def answers(server: Server) -> list[Answer]:
    """What sixty mixed requests got, eight at a time; all are in the telemetry."""
    green = server.post("tokenize", prompt=" green")["tokens"][0]
    with ThreadPoolExecutor(8) as clients:
        got = list(clients.map(lambda number: ask(server, number, green), range(REQUESTS)))
    engine_requests = sum(3 if answer.kind == "three" else 1 for answer in got)
    end_s = time.monotonic() + 60
    while len(server.fasers()[2]) < engine_requests:
        if time.monotonic() > end_s:
            pytest.fail(f"{len(server.fasers()[2])} of {engine_requests} requests ended in the telemetry")
        try:  # events ride on step records: an idle engine has none
            server.post("v1/completions", prompt="one", max_tokens=1)
            engine_requests += 1
        finally:
            time.sleep(0.5)
    return got


def own_counts(told: dict[str, Any]) -> Counter[str]:
    """Return vLLM's own counts of one request, as its response says."""
    metrics = told["metrics"]["speculative_decoding"]
    return Counter(
        verified=metrics["num_draft_tokens"],
        accepted=metrics["num_accepted_draft_tokens"],
        emitted=told["usage"]["completion_tokens"],
    )


def of_request(answer: Answer, found: dict[str, Any]) -> Any:
    """Return what is found under a response's id, which vLLM makes longer for its engine."""
    (name,) = [name for name in found if name.startswith(answer.request_id)]
    return found[name]


def test_counts_of_the_whole_server_are_vllms(server: Server, answers: list[Answer]) -> None:
    theirs = server.vllms()
    sums, _, _, apart = server.fasers()
    assert theirs["accepted"] > 100
    assert {name: sums[name] for name in ("verified", "accepted")} == {
        name: theirs[name] for name in ("verified", "accepted")
    }
    assert apart == 0
    # The front end no longer counts what it is handed of a request that it has ended: a client left, or a stop string.
    ended_by_it = sum(answer.kind in ("left", "stop string") for answer in answers)
    assert 0 <= sums["emitted"] - theirs["emitted"] <= 2 * 5 * ended_by_it


def test_counts_of_each_request_are_vllms(server: Server, answers: list[Answer]) -> None:
    _, requests, ends, _ = server.fasers()
    compared = Counter[str]()
    for answer in answers:
        if answer.told is None or answer.kind in ("three", "stop string"):
            continue
        own = own_counts(answer.told)
        assert +of_request(answer, requests) == +own, answer
        assert of_request(answer, ends)[::2] == ("finish", own["emitted"]), answer
        compared[answer.kind] += 1
    assert len(compared) == 7
    assert min(compared.values()) == REQUESTS // 10


def test_an_abort_says_whether_it_may_have_been_a_stop_string(server: Server, answers: list[Answer]) -> None:
    ends = server.fasers()[2]
    seen = {kind: Counter[Any]() for kind in ("left", "stop string")}
    for answer in answers:
        if answer.kind in seen:
            seen[answer.kind][of_request(answer, ends)[:2]] += 1
    assert seen["left"] == {("abort", None): REQUESTS // 10}
    assert set(seen["stop string"]) <= {("abort", STOP_OR_ABORT), ("finish", None)}
    assert seen["stop string"][("abort", STOP_OR_ABORT)] > 0
