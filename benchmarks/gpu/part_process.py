"""Runs parts, each in a fork of this process, which has imported what takes long: `part_process.py KIND`, by day.py.

One line of JSON on stdin is a part: {"module", "given", "ends_s", "result", "log"}. Two lines answer it: the fork's
process id, its own process group too, and its exit status. CUDA is first touched in the fork, so that it is whole there
and gone with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import checkout
from checkout import Missing


def main() -> None:
    """Import, then run parts until stdin ends."""
    kind, is_dry = sys.argv[1], "--dry-run" in sys.argv
    told = os.dup(1)
    os.dup2(2, 1)  # what is printed must not be taken for an answer
    checkout.make_importable()
    if "--bare" not in sys.argv:
        prepare(kind, is_dry)
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():  # no fork could use it
            os.dup2(told, 1)
            os.execv(sys.executable, [sys.executable, *sys.argv, "--bare"])
    say(told, "ready")
    for line in sys.stdin:
        part = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            run(part, is_dry)
        say(told, str(child))
        _, status = os.waitpid(child, 0)
        say(told, str(os.waitstatus_to_exitcode(status)))


def say(told: int, line: str) -> None:
    """Write one line."""
    os.write(told, f"{line}\n".encode())


def prepare(kind: str, is_dry: bool) -> None:
    """Import what all parts of the kind need. Without vLLM its parts find out themselves."""
    if kind == "vllm" and importlib.util.find_spec("vllm") is not None:
        if is_dry:
            sys.path.insert(0, str(checkout.ROOT / "tests" / "engine_adapter" / "v2"))
            import interpreter

            interpreter.install()
            import vllm.v1.worker.cpu.model_runner

            interpreter.top_k_by_torch()
        import vllm.entrypoints.llm
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.gpu.model_runner  # noqa: F401
    else:
        import torch

        torch.set_grad_enabled(False)


def run(part: dict[str, Any], is_dry: bool) -> None:
    """Do one part and end the process."""
    log = os.open(part["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    status = 0
    os.environ[checkout.ENDS_S] = str(part["ends_s"])
    try:
        told = {"result": importlib.import_module(part["module"]).measure(is_dry, **part["given"])}
    except Missing as reason:
        told = {"skipped": str(reason)}
    except BaseException as error:
        traceback.print_exc()
        told, status = {"error": f"{type(error).__name__}: {error}"[:500]}, 1
    Path(part["result"]).write_text(json.dumps(told))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
