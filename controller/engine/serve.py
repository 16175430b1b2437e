"""`faser serve MODEL [vllm options]`: a sidecar and an unmodified vLLM server in the foreground, ended together.

Called by the CLI; `faser demo` uses its parts. Everything the operator passes goes to vLLM; FASER adds its two classes
and refuses what contradicts them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from rich.console import Console

from ...models.embedded.pair import EMBEDDED_K_MAX, TARGET_NAME, EmbeddedPair, ensure_embedded_pair
from ...models.embedded.precision import is_bfloat16_slow
from ..config import Config
from ..decision.session import check_policy
from ..errors import EndpointError, EngineError, ModelError, StoreError, UsageError
from ..progress import progress_bar
from .launch import (
    EngineLaunch,
    available_cores,
    embedded_dtype,
    free_port,
    is_cpu_build,
    require_free_port,
    require_supported_vllm,
)
from .processes import ProcessTree, Terminated, deferred_interrupts, stopping_on_sigterm
from .running import RunningEngine
from .sidecar_child import log_folder, start_sidecar

EMBEDDED: Final = "embedded"
BFLOAT16_SLOW: Final = (
    "this processor has no AVX-512: it multiplies bfloat16 row by row, and no draft can pay; "
    "a bfloat16 model is faster with --dtype float32"
)
_DEFAULT_PORT: Final = 8000
_SPECULATIVE_FLAGS: Final = ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens")
_OUR_FLAGS: Final = ("--scheduler-cls", "--worker-cls")
_POLL_S: Final = 0.2


EMBEDDED_ARGUMENTS: Final = (
    "--served-model-name", TARGET_NAME,
    "--max-model-len", "2048",
    "--max-num-seqs", "64",
    "--enforce-eager",  # compiling wants a C++ compiler and a minute
)  # fmt: skip


def embedded_launch(
    pair: EmbeddedPair, endpoint: str, port: int | None = None, arguments: Sequence[str] = (), splits: str = ""
) -> EngineLaunch:
    """Return the launch of the embedded pair on loopback; `arguments` come after the defaults and win over them.

    :param splits: of the cores, which a lease may then ask for; unsplit the target has a thread on each
    """
    is_ours = not _has_flag(arguments, _SPECULATIVE_FLAGS)
    return EngineLaunch(
        model=str(pair.target),
        port=port or free_port(),
        host=flag_value(arguments, "--host") or "127.0.0.1",
        speculative=pair.speculative() if is_ours else None,
        arguments=(*EMBEDDED_ARGUMENTS, "--dtype", embedded_dtype(), *_without_flags(arguments, ("--host", "--port"))),
        endpoint=endpoint,
        is_cpu=is_cpu_build(),
        kv_cache_gib=1,
        draft_max=EMBEDDED_K_MAX if is_ours else None,
        threads=available_cores() if splits else None,
        environment_extra={"FASER_SPLITS": splits} if splits else {},
        ranks=_ranks(arguments, "eagle3" if is_ours else _method(arguments)),
    )


def model_launch(model: str, endpoint: str, arguments: Sequence[str]) -> EngineLaunch:
    """Return the launch of the operator's own model with the operator's own drafter."""
    if not _has_flag(arguments, _SPECULATIVE_FLAGS):
        raise EngineError(
            f"no drafter configured for {model}",
            "vLLM's --speculative-config",
            'add for example --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4, '
            '"prompt_lookup_max": 4}\', or serve "embedded"',
        )
    _require_json(arguments)
    path = Path(model).expanduser()
    if model.startswith(("/", "./", "../", "~")) and not path.exists():
        raise ModelError(f"no model at {model}", "a folder with config.json and weights", "check the path")
    return EngineLaunch(
        model=str(path.absolute()) if path.is_dir() else model,
        port=_port(arguments),
        host=flag_value(arguments, "--host"),
        arguments=tuple(_without_flags(arguments, ("--host", "--port"))),
        endpoint=endpoint,
        is_cpu=is_cpu_build(),
        ranks=_ranks(arguments, _method(arguments)),
    )


def _ranks(arguments: Sequence[str], method: str | None) -> int:
    """Return the ranks of the pipeline; raise EngineError for a drafting method that it cannot have on a CPU."""
    text = flag_value(arguments, "--pipeline-parallel-size") or flag_value(arguments, "-pp") or "1"
    ranks = int(text) if text.isdecimal() else 1  # vLLM says what is wrong with anything else
    if ranks > 1 and is_cpu_build() and method not in (None, "ngram"):
        raise EngineError(
            f"method {method} with --pipeline-parallel-size {ranks}",
            "ngram, the method for which vLLM's V1 runner needs no drafter on every rank",
            'pass --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}\', '
            "or one rank",
        )
    return ranks


def _method(arguments: Sequence[str]) -> str | None:
    """Return the drafting method that is asked for, None if vLLM has to find out."""
    text = flag_value(arguments, "--speculative-config") or flag_value(arguments, "-sc")
    try:
        named = json.loads(text).get("method") if text else flag_value(arguments, "--spec-method")
    except (ValueError, AttributeError):
        return None  # _require_json has the right words for it
    return None if named is None else str(named)


def _require_json(arguments: Sequence[str]) -> None:
    """Raise EngineError for a --speculative-config that vLLM would answer with two hundred lines."""
    text = flag_value(arguments, "--speculative-config") or flag_value(arguments, "-sc")
    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        given = error
    if not isinstance(given, dict):
        raise EngineError(
            f"--speculative-config {text[:80] if text else ''} is no JSON object",
            '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}\', for example',
            "quote it with '...', so that the shell leaves it whole",
        )


def is_slow(launch: EngineLaunch) -> bool:
    """Return whether this machine computes a bfloat16 model row by row and nobody has chosen another type."""
    return launch.is_cpu and is_bfloat16_slow() and not _has_flag(launch.arguments, ("--dtype",))


def run_serve(model: str, vllm_arguments: Sequence[str], config: Config) -> int:
    """Serve until Ctrl-C or until the engine ends; return the exit code."""
    console = Console(stderr=True)
    for flag in _OUR_FLAGS:
        if _has_flag(vllm_arguments, (flag,)):
            raise UsageError(f"{flag} with faser serve", "FASER's own class there", "drop it, or run vLLM by hand")
    check_policy(config.policy.spec)
    require_supported_vllm()
    endpoint = config.link.endpoint
    if model == EMBEDDED:
        with progress_bar(console) as show:
            pair = ensure_embedded_pair(show)
        splits = os.environ.get("FASER_SPLITS", "")
        launch = embedded_launch(pair, endpoint, _port(vllm_arguments), vllm_arguments, splits)
    else:
        launch = model_launch(model, endpoint, vllm_arguments)
        if is_slow(launch):
            console.print(f"faser: {BFLOAT16_SLOW}", highlight=False, soft_wrap=True)
    require_free_port(launch.port, launch.host)
    log = log_folder() / f"engine-{launch.port}.log"
    log.unlink(missing_ok=True)
    with ExitStack() as stack, stopping_on_sigterm():
        with deferred_interrupts():
            sidecar = start_sidecar(config)
            if sidecar is None:
                console.print(f"faser: a sidecar already runs at {endpoint}; using it", highlight=False, soft_wrap=True)
            else:
                stack.enter_context(sidecar)
            engine = stack.enter_context(RunningEngine(launch, log, cwd=Path.cwd()))
        try:
            return _follow(engine, sidecar, console)
        except KeyboardInterrupt as interrupt:
            console.print("faser: stopping", highlight=False, soft_wrap=True)
            return 143 if isinstance(interrupt, Terminated) else 130


def _follow(engine: RunningEngine, sidecar: ProcessTree | None, console: Console) -> int:
    """Copy both logs to the terminal until the engine ends; a lost sidecar is reported, the engine serves on."""
    is_ready, is_sidecar_lost = False, False
    with ExitStack() as stack:
        logs = [stack.enter_context(path.open("rb")) for path in (engine.log, *([sidecar.log] if sidecar else []))]
        while True:
            if sidecar is not None and not is_ready and (code := sidecar.poll()) is not None:
                _require_no_complaint(sidecar, code)  # before its log is copied: its one line is said once
            for log in logs:
                _copy_new(log)
            engine.require_running()
            if not is_ready and engine.is_ready():
                is_ready = True
                console.print(
                    f"faser: serving on {engine.launch.url}/v1; Ctrl-C stops", highlight=False, soft_wrap=True
                )
            if sidecar is not None and not is_sidecar_lost and (code := sidecar.poll()) is not None:
                is_sidecar_lost = True
                console.print(
                    f"faser: the sidecar ended with code {code}; the engine goes on with its default lengths; "
                    f"start one with: faser sidecar (log: {sidecar.log})",
                    highlight=False,
                    soft_wrap=True,
                )
            time.sleep(_POLL_S)


def _require_no_complaint(sidecar: ProcessTree, code: int) -> None:
    """Raise the sidecar's own error if it refused to start, such as for a store that cannot be written."""
    refused = {error.exit_code: error for error in (UsageError, EndpointError, StoreError)}
    if (error := refused.get(code)) is not None:
        said = sidecar.log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise error(f"the sidecar did not start: {said.removeprefix('faser: ')}")


def _copy_new(log: BinaryIO) -> None:
    if text := log.read():
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag among vLLM's arguments, given as `--flag value` or `--flag=value`."""
    value = None
    for position, argument in enumerate(arguments):
        name, equals, rest = argument.partition("=")
        if _spelled(name) == flag:
            value = rest if equals else next(iter(arguments[position + 1 : position + 2]), "")
    return value


def _has_flag(arguments: Sequence[str], flags: Sequence[str]) -> bool:
    """Return whether a flag is given; vLLM also takes `--flag.key value` and underscores."""
    return any(_spelled(argument.split("=")[0].split(".")[0]) in flags for argument in arguments)


def _without_flags(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    kept, is_value = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_value:
            is_value = False
        elif _spelled(name) in flags:
            is_value = not equals
        else:
            kept.append(argument)
    return kept


def _spelled(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _port(arguments: Sequence[str]) -> int:
    text = flag_value(arguments, "--port")
    if text is None:
        return _DEFAULT_PORT
    if not text.isdecimal():
        raise UsageError(f"--port {text}", "a number", "pass --port N")
    return int(text)
