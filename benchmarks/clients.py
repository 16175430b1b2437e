"""Third-party clients against `faser serve`, unmodified: vLLM's serving benchmark and the openai package, beside ours.

    python benchmarks/clients.py                             # about 6 minutes: one server, 5 rounds of 3 clients
    python benchmarks/clients.py --guidellm PATH             # guidellm's command too, from an environment of its own

Every client sends the same held-out prompts, so many at a time, with answers of a fixed length, streamed; they take
turns, another one first in each round. A client agrees with ours if the 95 % interval of the ratio of its figures to
ours, round by round, contains 1, or if the ratio is within 5 % of it. Results: benchmarks/results/clients.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from openai import AsyncOpenAI

from faser.controller.bench.plan import turn_order
from faser.controller.bench.ratio import Ratio, paired_ratio, student_interval
from faser.controller.bench.workload import in_turns, stream_prompts
from faser.controller.engine.launch import free_port
from faser.controller.engine.load_generator import LoadGenerator, LoadOptions
from faser.controller.engine.machine import Machine, commit, machine_facts, versions
from faser.controller.engine.processes import ProcessTree
from faser.controller.engine.running import is_healthy
from faser.controller.errors import EngineError, FaserError
from faser.controller.whole_file import replacing, require_place
from faser.env.workload.workload import TimedRequest
from faser.models.embedded.pair import TARGET_NAME, ensure_embedded_pair

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results" / "clients.json"
OURS: Final = "faser"
FIGURES: Final = ("tokens_per_s", "ttft_ms", "tpot_ms")
NEAR: Final = 0.05
READY_S: Final = 300.0
CLIENT_S: Final = 600.0
# vLLM's own command line for CPUs does not start; its benchmark does.
VLLM_BENCH: Final = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())"
)


class Run(msgspec.Struct, frozen=True):
    """One client once. Latencies are medians over requests; times count from when a request is sent."""

    client: str
    round: int
    requests: int
    failed: int
    tokens: int
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    load_average: float = 0.0


class Results(msgspec.Struct):
    """The file."""

    machine: Machine
    versions: dict[str, str]
    commit: str
    settings: dict[str, int]
    note: str = ""
    runs: list[Run] = []


@dataclass(frozen=True, slots=True)
class Work:
    """What every client sends."""

    url: str
    tokenizer: Path
    requests: tuple[TimedRequest, ...]
    concurrency: int
    folder: Path


Client = Callable[[Work], Run]


def make_requests(count: int, tokens: int, seed: int) -> tuple[TimedRequest, ...]:
    """Return the requests, the kinds of prompts in turn."""
    chosen = in_turns(stream_prompts(200), np.random.default_rng(seed))[:count]
    return tuple(TimedRequest(0.0, each.text, each.kind, tokens, each.id, each.tokens) for each in chosen)


def told(client: str, spans: Sequence[tuple[float, float, int]], wall_s: float, failed: int) -> Run:
    """Return a run from (time to first token, to last token, tokens) of each finished request, seconds."""
    tokens = sum(count for _, _, count in spans)
    first = [ttft_s for ttft_s, _, _ in spans]
    each = [(last_s - ttft_s) / (count - 1) for ttft_s, last_s, count in spans if count > 1]
    return Run(
        client, 0, len(spans), failed, tokens, tokens / wall_s if wall_s > 0 else 0.0,
        1e3 * float(np.median(first)) if first else math.nan, 1e3 * float(np.median(each)) if each else math.nan,
    )  # fmt: skip


def with_ours(work: Work) -> Run:
    """Send it with the load generator of `faser bench`."""
    options = LoadOptions(work.url, TARGET_NAME, max_connections=work.concurrency, ignore_eos=True)
    generator = LoadGenerator(work.requests, options)
    asyncio.run(generator.run(asyncio.Event()))
    sent = [replace(each, due_s=each.sent_s) for each in generator.results if each.sent_s is not None]
    spans = [
        (ttft_ms / 1e3, (each.e2e_ms or 0.0) / 1e3, each.output_tokens)
        for each in sent
        if each.outcome == "finished" and (ttft_ms := each.ttft_ms) is not None
    ]
    summary = generator.summary()
    return told(OURS, spans, summary.wall_s, summary.failed)


def with_openai(work: Work) -> Run:
    """Send it with the openai package, as its documentation shows."""
    return asyncio.run(_with_openai(work))


async def _with_openai(work: Work) -> Run:
    gate = asyncio.Semaphore(work.concurrency)
    client = AsyncOpenAI(base_url=f"{work.url}/v1", api_key="none", max_retries=0)

    async def send(request: TimedRequest) -> tuple[float, float, int] | None:
        async with gate:
            begun_s, first_s, last_s, tokens = time.perf_counter(), math.nan, math.nan, 0
            stream = await client.chat.completions.create(
                model=TARGET_NAME, messages=[{"role": "user", "content": request.prompt}], temperature=0.0,
                max_tokens=request.max_tokens, stream=True, stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    last_s = time.perf_counter() - begun_s
                    first_s = last_s if math.isnan(first_s) else first_s
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
            return None if math.isnan(first_s) else (first_s, last_s, tokens)

    begun_s = time.perf_counter()
    async with client:
        ended = await asyncio.gather(*(send(request) for request in work.requests), return_exceptions=True)
    wall_s = time.perf_counter() - begun_s
    spans = [each for each in ended if isinstance(each, tuple)]
    return told("openai", spans, wall_s, len(ended) - len(spans))


def with_vllm(work: Work) -> Run:
    """Send it with vLLM's benchmark, prompts given as a ShareGPT file: that wants no further package."""
    path, name = work.folder / "sharegpt.json", "vllm.json"
    path.write_text(json.dumps(conversations(work.requests)))
    arguments = [
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", work.url,
        "--model", TARGET_NAME, "--tokenizer", str(work.tokenizer),
        "--dataset-name", "sharegpt", "--dataset-path", str(path), "--disable-shuffle", "--no-oversample",
        "--sharegpt-output-len", str(work.requests[0].max_tokens), "--num-prompts", str(len(work.requests)),
        "--max-concurrency", str(work.concurrency), "--ignore-eos", "--temperature", "0", "--disable-tqdm",
        "--ready-check-timeout-sec", "0", "--save-result", "--save-detailed", "--result-dir", str(work.folder),
        "--result-filename", name,
    ]  # fmt: skip
    _run([sys.executable, "-P", "-c", VLLM_BENCH, *arguments], work.folder)
    return read_vllm(json.loads((work.folder / name).read_text()))


def conversations(requests: Sequence[TimedRequest]) -> list[dict[str, Any]]:
    """Return prompts as ShareGPT's file has them; the answers are only there to be counted as long enough."""
    answer = {"from": "gpt", "value": "An answer of enough words to be taken for one."}
    return [{"conversations": [{"from": "human", "value": each.prompt}, answer]} for each in requests]


def read_vllm(found: dict[str, Any]) -> Run:
    """Return what vLLM's benchmark measured."""
    whole = zip(found["ttfts"], found["itls"], found["output_lens"], found["errors"], strict=True)
    spans = [(ttft_s, ttft_s + sum(gaps), count) for ttft_s, gaps, count, error in whole if not error and count]
    return told("vllm", spans, found["duration"], len(found["ttfts"]) - len(spans))


def with_guidellm(command: str, work: Work) -> Run:
    """Send it with guidellm from another environment."""
    path, output = work.folder / "prompts.jsonl", work.folder / "guidellm.json"
    lines = [json.dumps({"prompt": each.prompt, "output_tokens_count": each.max_tokens}) for each in work.requests]
    path.write_text("\n".join(lines) + "\n")
    arguments = [
        "run", "--backend", f"kind=openai_http,target={work.url},model={TARGET_NAME}",
        "--profile", f"kind=concurrent,streams={work.concurrency}",
        "--constraint", f"kind=max_requests,count={len(work.requests)}",
        "--tokenizer", f"kind=huggingface_auto,model={work.tokenizer}", "--data", f"kind=json_file,path={path}",
        "--output", f"kind=json,path={output}", "--disable-console",
    ]  # fmt: skip
    _run([command, *arguments], work.folder)
    return read_guidellm(json.loads(output.read_text()))


def read_guidellm(found: dict[str, Any]) -> Run:
    """Return what guidellm measured."""
    benchmark = found["benchmarks"][0]
    done = benchmark["requests"]["successful"]
    spans = [(each["time_to_first_token_ms"] / 1e3, each["request_latency"], each["output_tokens"]) for each in done]
    return told("guidellm", spans, benchmark["duration"], len(benchmark["requests"]["errored"]))


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=CLIENT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{Path(command[0]).name}: {error}", "a client that runs") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EngineError(f"{Path(command[0]).name} ended with code {done.returncode}: {last[:300]}", "0")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Run `faser serve embedded` and give its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"FASER_RUNTIME_DIR": str(folder / "run"), "FASER_STORE": str(folder / "t.sqlite")}
    command = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()"]
    log = folder / "serve.log"
    with ProcessTree([*command, "serve", "embedded", "--port", str(port)], environment, log) as server:
        end_s = time.monotonic() + READY_S
        while not is_healthy(url):
            if server.poll() is not None or time.monotonic() > end_s:
                raise EngineError("faser serve was not ready", f"readiness within {READY_S:g} s", f"see {log}")
            time.sleep(0.3)
        yield url


def ratio(runs: Sequence[Run], client: str, figure: str) -> Ratio:
    """Return a client's figure over ours, round by round."""
    by_round = {(run.client, run.round): getattr(run, figure) for run in runs if not run.failed}
    rounds = sorted({run.round for run in runs})
    both = [(by_round.get((client, each)), by_round.get((OURS, each))) for each in rounds]
    return paired_ratio(np.array([math.log(its / ours) for its, ours in both if its and ours]), student_interval)


def agrees(found: Ratio) -> bool:
    """Say whether a figure is ours within spread, or so near that the difference does not matter."""
    return found.low <= 1.0 <= found.high or abs(found.value - 1.0) <= NEAR


def table(results: Results) -> str:
    """Return the comparison as a Markdown table."""
    lines = ["| client | requests, failed | tokens/s | first token, ms | per token, ms |", "|---|---|---|---|---|"]
    clients = list(dict.fromkeys(run.client for run in results.runs))
    for client in sorted(clients, key=lambda name: name != OURS):
        own = [run for run in results.runs if run.client == client]
        cells = [f"{np.median([getattr(run, figure) for run in own]):.1f}" for figure in FIGURES]
        if client != OURS:
            found = [ratio(results.runs, client, figure) for figure in FIGURES]
            cells = [
                f"{cell}, ratio {each}{'' if agrees(each) else ' differs'}"
                for cell, each in zip(cells, found, strict=True)
            ]
        counts = f"{sum(run.requests for run in own)}, {sum(run.failed for run in own)}"
        lines.append(f"| {client} | {counts} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure(options: argparse.Namespace, results: Results) -> None:
    """Fill in the runs; what is measured is in the file after every round."""
    clients: dict[str, Client] = {OURS: with_ours, "openai": with_openai, "vllm": with_vllm}
    if options.guidellm:
        clients["guidellm"] = lambda work: with_guidellm(options.guidellm, work)
    pair = ensure_embedded_pair()
    with tempfile.TemporaryDirectory(prefix="faser-") as name, served(Path(name)) as url:
        for round_ in range(-1, options.rounds):  # the first is a warm-up: of clients, and FASER learns the engine
            requests = make_requests(options.requests, options.tokens, round_ + 1)
            work = Work(url, pair.target, requests, options.concurrency, Path(name))
            for client in turn_order(tuple(clients), round_ + 1):
                run = msgspec.structs.replace(clients[client](work), round=round_, load_average=os.getloadavg()[0])
                print(
                    f"clients: round {round_}, {client}: {run.tokens_per_s:.1f} tokens/s, {run.failed} failed",
                    flush=True,
                )
                if round_ >= 0:
                    results.runs.append(run)
            with replacing(options.out) as place:
                place.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24, help="of each client in each round")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--guidellm", help="the command of an installed guidellm")
    parser.add_argument("--note", default="", help="a remark kept in the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if min(options.rounds, options.requests, options.concurrency) < 1 or not 8 <= options.tokens <= 512:
        parser.error("rounds, requests and concurrency: at least 1; tokens: 8 to 512")
    require_place(options.out, "--out")
    settings = {name: getattr(options, name) for name in ("rounds", "requests", "concurrency", "tokens")}
    packages = versions() | {"openai": __import__("openai").__version__}
    results = Results(machine_facts(), packages, commit(), settings, options.note)
    try:
        measure(options, results)
    except FaserError as error:
        print(f"clients: {error}", file=sys.stderr)
        return error.exit_code
    print(table(results))
    return int(any(run.failed for run in results.runs))


if __name__ == "__main__":
    sys.exit(main())
