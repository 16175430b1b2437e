"""One arm of serve.py: `serve_engine.py TASK`, TASK as JSON; serves every load and prints one line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve_load import Asked, drive

SIDECAR = (
    "import sys; sys.path.insert(0, {folder!r}); from checkout import make_importable; make_importable(); "
    "from faser.controller.cli.main import main; main()"
)


class VllmEngine:
    """vLLM in this process, fed with token ids."""

    def __init__(self, engine: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine, self._parameters, self._kind = engine, SamplingParams, RequestOutputKind.CUMULATIVE

    def now_s(self) -> float:
        """Return the monotonic time."""
        return time.monotonic()

    def wait_until(self, time_s: float) -> None:
        """Sleep."""
        time.sleep(max(time_s - time.monotonic(), 0.0))

    def add(self, name: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Take in a request; prompts differ, so that nothing is shared."""
        ids = [2 + (int(name) * 31 + at * 7) % 90 for at in range(prompt_tokens)]
        parameters = self._parameters(
            temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False, output_kind=self._kind
        )
        self._engine.add_request(name, {"prompt_token_ids": ids}, parameters)

    def step(self) -> list[tuple[str, int, bool]]:
        """Run the engine until it says something; a prompt in chunks gives nothing yet."""
        outputs = self._engine.step()
        return [(each.request_id, len(each.outputs[0].token_ids), each.finished) for each in outputs]


def speculation(task: dict[str, Any]) -> dict[str, Any] | None:
    """Return vLLM's configuration of the drafter; acceptance by decree, per position, unless it is per request."""
    arm = task["arm"]
    if arm == "none":
        return None
    length = int(arm[1:]) if arm[0] == "k" else task["length"]
    config: dict[str, Any] = {
        "method": "draft_model", "model": task["drafter"], "num_speculative_tokens": length,
        "draft_load_config": {"load_format": "dummy"},
    }  # fmt: skip
    if task["rates"]:  # not on CPUs
        rates = task["rates"][:length]
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    if arm == "adaptive":
        config["enable_adaptive_verification"] = True
    return config


def impose(llm: Any, generator: dict[str, Any]) -> None:
    """Let every request of an engine have its own acceptance."""
    import msgspec
    from imposed import Decree, Fates

    from faser.env.profile.acceptance_model import AcceptanceModel

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    Decree(runner, Fates(msgspec.convert(generator, AcceptanceModel)))


def counted(llm: Any) -> dict[str, int]:
    """Return draft tokens verified and accepted since the start, by vLLM's own counters."""
    names = {"draft_tokens": 0, "accepted_tokens": 0}
    for metric in llm.get_metrics():
        if (name := metric.name.removeprefix("vllm:spec_decode_num_")) in names:
            names[name] += int(metric.value)
    return names


@contextlib.contextmanager
def sidecar(arm: str) -> Iterator[None]:
    """Start FASER's sidecar for its arm and point the engine at it."""
    if arm != "faser":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        own = {"FASER_ENDPOINT": f"ipc://{folder}/engine.sock", "FASER_STORE": f"{folder}/t.sqlite",
               "FASER_MODE_STATE": f"{folder}/modes.json", "XDG_CONFIG_HOME": folder}  # fmt: skip
        os.environ |= own
        code = SIDECAR.format(folder=str(Path(__file__).resolve().parent))
        process = subprocess.Popen([sys.executable, "-c", code, "sidecar"], cwd="/", stdout=subprocess.DEVNULL)
        try:
            yield
            if (ended := process.poll()) is not None:
                raise RuntimeError(f"the sidecar ended with code {ended}")
        finally:
            process.terminate()
            process.wait(30)


def main() -> None:
    """Serve every load, the first one once more beforehand to warm up."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: what is not installed is importable in it
    extra: dict[str, Any] = {}
    if (config := speculation(task)) is not None:
        extra["speculative_config"] = config
    if task["arm"] == "faser" or task["generator"]:
        from checkout import make_importable

        make_importable()
    if task["generator"]:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        extra["async_scheduling"] = False
    if task["arm"] == "faser":
        extra["scheduler_cls"] = "faser.engine_adapter.scheduler.FaserScheduler"
        extra["worker_cls"] = "faser.engine_adapter.worker.FaserWorker"
    else:
        os.environ["VLLM_PLUGINS"] = "none"
    with sidecar(task["arm"]):
        from vllm import LLM

        llm = LLM(
            model=task["target"], load_format=task["load_format"], skip_tokenizer_init=True, max_model_len=2048, seed=0,
            max_num_seqs=task["most"], enable_prefix_caching=False, enforce_eager=task["is_eager"],
            disable_log_stats=False, **extra,
        )  # fmt: skip
        if task["generator"]:
            impose(llm, task["generator"])
        engine, found = VllmEngine(llm.llm_engine), {}
        for name, load, requests in [task["loads"][0], *task["loads"]]:
            before = counted(llm)
            found[name] = drive(engine, [Asked(*request) for request in requests], load)
            found[name] |= {what: many - before[what] for what, many in counted(llm).items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
