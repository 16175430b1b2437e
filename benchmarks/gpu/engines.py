"""vLLM engines on its V2 runner, with or without FASER: configured by an arm's name, in this process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from checkout import ROOT, Missing, make_importable

TESTS: Final = ROOT / "tests" / "engine_adapter" / "v2"  # the rule in the place of leases, the dry run's tiny models
FASER: Final = {
    "scheduler_cls": "faser.engine_adapter.scheduler.FaserScheduler",
    "worker_cls": "faser.engine_adapter.worker.FaserWorker",
}
SIDECAR: Final = (
    "import sys; sys.path.insert(0, {folder!r}); from checkout import make_importable; make_importable(); "
    "from faser.controller.cli.main import main; main()"
)
# Milliseconds of drafting by requests, of verifying by tokens.
DRY_CURVES: Final = ([(1, 1.0), (8, 1.0)], [(1, 4.0), (8, 4.0), (16, 6.0), (256, 70.0)])
IS_ADAPTIVE: Final = {"adaptive", "faser-adaptive"}  # arms with vLLM's adaptive verification on
SPLITS: Final = ("streams", "1:15", "1:7", "1:3", "1:1")  # of the SMs, drafter to target


def settings(is_dry: bool, dtype: str) -> dict[str, Any]:
    """Return what all engines of a part share.

    Nothing is compiled, since Inductor would take a minute of each engine's start; full graphs hold every step whose
    size was captured, prompts and mixed lengths too.
    """
    common: dict[str, Any] = {"dtype": dtype, "seed": 0, "enable_prefix_caching": False, "disable_log_stats": False}
    if is_dry:
        return common | {
            "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 64,
        }  # fmt: skip
    return common | {"max_model_len": 1024, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}


def drafting(arm: str, chosen: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return vLLM's options of an arm.

    :param arm: `none`, `kN`, `lengths`, `adaptive`, `faser`, `faser-adaptive` or `faser-splits`
    :param chosen: method and model of the drafter
    """
    if arm == "none":
        return {}
    config = chosen | {"num_speculative_tokens": int(arm[1:]) if arm[1:].isdigit() else longest}
    if arm in (
        "lengths",
        "faser",
        "faser-splits",
    ):  # every length gets graphs of its own: in FASER's arm too, which may ask for any
        steps = [[place, place, place - 1] for place in range(1, longest + 1)]
        config["num_speculative_tokens_per_batch_size"] = [*steps, [longest + 1, 4096, longest]]
    if arm in IS_ADAPTIVE:
        config["enable_adaptive_verification"] = True
    return {"speculative_config": config} | (FASER if arm.startswith("faser") else {})


def require_vllm() -> None:
    """Raise Missing without vLLM."""
    if find_spec("vllm") is None:
        raise Missing("vLLM is not there; --site names the folder it was unpacked into")


def build(model: str, arm: str, options: dict[str, Any], is_dry: bool, is_async: bool = True) -> Any:
    """Start an engine; raise Missing where vLLM or FASER refuses the arm."""
    make_importable()
    if not arm.startswith("faser"):
        os.environ["VLLM_PLUGINS"] = "none"
    if is_dry:
        _prepare_interpreter(arm, is_async)
    from vllm import LLM

    try:
        if arm.startswith("faser"):
            _check_wanted(model, options | {"async_scheduling": is_async})
        llm = LLM(model, async_scheduling=is_async, **options)
    except Missing:
        raise
    except Exception as error:  # vLLM's is a pydantic one with the reason in it
        if arm in IS_ADAPTIVE and "daptive verification" in str(error):
            raise Missing(f"vLLM refuses adaptive verification: {_line(error)}") from error
        raise
    if arm.startswith("faser"):
        _check_steered(llm)
    if is_dry and arm in IS_ADAPTIVE:  # vLLM measures these while it captures graphs, of which a CPU has none
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        runner.adaptive_verification.set_cost_curves(*DRY_CURVES)
    return llm


def _prepare_interpreter(arm: str, is_async: bool) -> None:
    import interpreter

    if is_async:
        interpreter.keep_async_scheduling()
    if arm in IS_ADAPTIVE:
        interpreter.allow_adaptive_verification()


def _line(error: Exception) -> str:
    line = next(line.strip() for line in str(error).splitlines() if "daptive verification" in line)
    return line.partition(" [type=")[0].removeprefix("Value error, ")


def _check_wanted(model: str, options: dict[str, Any]) -> None:
    """Raise Missing where FASER would refuse the engine: that is known before half a minute of building it."""
    from vllm.engine.arg_utils import EngineArgs

    from faser.engine_adapter.hello import refusal

    if (reason := refusal(EngineArgs(model=model, **options).create_engine_config())) is not None:
        raise Missing(f"FASER refuses: {reason}")


def _check_steered(llm: Any) -> None:
    if getattr(scheduler_of(llm), "steering", None) is None:
        raise RuntimeError("FASER switched itself off; its log says why")


def scheduler_of(llm: Any) -> Any:
    """Return the scheduler, which is in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def runner_of(llm: Any) -> Any:
    """Return the model runner."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def facts(llm: Any) -> dict[str, Any]:
    """Return what kind of engine came out: whether it is what the arm's name says stands in the results."""
    runner = runner_of(llm)
    return {
        "runner": f"{type(runner).__module__}.{type(runner).__name__}", "scheduler": type(scheduler_of(llm)).__name__,
        "is_async": bool(scheduler_of(llm).scheduler_config.async_scheduling),
        "graphs": str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode),
        "attention": sorted({group.backend.get_name() for groups in getattr(runner, "attn_groups", ())
                             for group in groups}),
        "flash_attention": sorted(_flash_attention(llm)), "faults": dict(getattr(runner, "faults", {})),
    }  # fmt: skip


def _flash_attention(llm: Any) -> set[int]:
    """Return the versions of FlashAttention in use; none where layers have another back end."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    found = {getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None) for layer in layers}
    return {version for version in found if version is not None}


class VllmEngine:
    """vLLM, fed with token ids."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine, self._vocabulary = llm.llm_engine, vocabulary
        self._parameters, self._kind = SamplingParams, RequestOutputKind.CUMULATIVE

    def now_s(self) -> float:
        """Return the monotonic time."""
        return time.monotonic()

    def add(self, name: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Take in a request; prompts differ, so that nothing is shared."""
        ids = [2 + (int(name) * 31 + place * 7) % (self._vocabulary - 2) for place in range(prompt_tokens)]
        parameters = self._parameters(
            temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False, output_kind=self._kind
        )
        self._engine.add_request(name, {"prompt_token_ids": ids}, parameters)

    def step(self) -> list[tuple[str, int, bool]]:
        """Run the engine until it says something; a prompt in chunks gives nothing yet."""
        outputs = self._engine.step()
        return [(each.request_id, len(each.outputs[0].token_ids), each.finished) for each in outputs]


class Leases:
    """Counts the steps of FASER's engines in this process, and those that a lease of the sidecar's held in."""

    def __init__(self) -> None:
        from faser.engine_adapter.steering.steering import Steering

        self.steps = self.held = 0
        inherited = Steering.order

        def order(steering: Steering, *given: Any) -> Any:
            found = inherited(steering, *given)
            self.steps += 1
            self.held += found.lease_epoch > 0
            return found

        Steering.order = order  # type: ignore[method-assign]


def counted(llm: Any, leases: Leases | None) -> dict[str, int]:
    """Return draft tokens verified and accepted since the start, by vLLM's own counters; with FASER its steps too."""
    names = {"draft_tokens": 0, "accepted_tokens": 0}
    for metric in llm.get_metrics():
        if (name := metric.name.removeprefix("vllm:spec_decode_num_")) in names:
            names[name] += int(metric.value)
    return names if leases is None else names | {"steps": leases.steps, "steps_under_lease": leases.held}


@contextlib.contextmanager
def sidecar(arm: str, is_dry: bool) -> Iterator[Callable[[], None]]:
    """Start FASER's sidecar for its arms and point the engine at it; what is yielded waits until it listens.

    After an installation it compiles for half a minute first.
    """
    if not arm.startswith("faser"):
        yield lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        os.environ |= {
            "FASER_ENDPOINT": f"ipc://{folder}/engine.sock", "FASER_STORE": f"{folder}/t.sqlite",
            "FASER_MODE_STATE": f"{folder}/modes.json", "XDG_CONFIG_HOME": folder, "FASER_RUNTIME_DIR": folder,
        }  # fmt: skip
        if arm == "faser-splits":
            os.environ["FASER_SPLITS"] = ",".join(SPLITS)
        if is_dry:  # an interpreted step may outlast a lease of a second
            os.environ["FASER_LEASE_MS"] = "60000"
        code = SIDECAR.format(folder=str(Path(__file__).resolve().parent))
        own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        process = subprocess.Popen([sys.executable, "-c", code, "sidecar"], cwd="/", stdout=sys.stderr, env=own)
        try:
            yield lambda: _wait_for(Path(folder, "engine.sock"), process)
            if (ended := process.poll()) is not None:
                raise RuntimeError(f"the sidecar ended with code {ended}")
        finally:
            process.terminate()
            process.wait(30)


def _wait_for(socket: Path, process: subprocess.Popen[bytes], most_s: float = 90.0) -> None:
    ends_s = time.monotonic() + most_s
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > ends_s:
            raise RuntimeError(f"the sidecar does not listen; its exit status is {process.poll()}")
        time.sleep(0.1)


def written(configuration: dict[str, Any], folder: Path) -> str:
    """Write a model's configuration: its weights are vLLM's own random ones."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configuration))
    return str(folder)
