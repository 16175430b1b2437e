"""One engine whose workers are processes of their own, steered; run as a process. Reads a scenario, writes a result.

The scenario: model, speculation, rule, tensor_parallel, result.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Return what the engine said, and what FASER saw of it."""
    import interpreter
    import jobs
    from steer import Steer, rule_of

    interpreter.keep_async_scheduling()
    steer = Steer(rule_of(given["rule"]))
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        given["model"], **(jobs.SMALL | jobs.FASER), async_scheduling=True, distributed_executor_backend="mp",
        tensor_parallel_size=given["tensor_parallel"], speculative_config=given["speculation"],
    )  # fmt: skip
    asked = jobs.prompts((5, 17, 40, 90), given["vocabulary"])
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    done = llm.generate(asked, greedy, use_tqdm=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return {
        "tokens": [[list(output.token_ids) for output in request.outputs] for request in done],
        "executor": type(llm.llm_engine.model_executor).__name__,
        "is_steered": scheduler.steering is not None,
        "check": steer.check(),
    }


if __name__ == "__main__":
    scenario = json.load(sys.stdin)
    Path(scenario["result"]).write_text(json.dumps(main(scenario)))
    os._exit(0)  # workers that hang at their end are not what is tested
