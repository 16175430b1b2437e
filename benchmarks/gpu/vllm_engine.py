"""One engine of part_vllm.py: `vllm_engine.py TASK`, TASK as JSON; prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Final

DRAFT_TOKENS: Final = "vllm:spec_decode_num_draft_tokens"  # verified, by vLLM's own counter


def main() -> None:
    """Build the engine, generate twice, time the second."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    extra: dict[str, Any] = {}
    if task["arm"] != "none":
        extra["speculative_config"] = {
            "method": "draft_model", "model": task["drafter"], "num_speculative_tokens": task["length"],
            "draft_load_config": {"load_format": "dummy"},
        }  # fmt: skip
        if task["accepted"] is not None:  # of each position, so that all before it count too; not on CPUs
            rates = [task["accepted"] ** (position + 1) for position in range(task["length"])]
            extra["speculative_config"] |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": rates,
            }
    if task["arm"] == "faser":
        from checkout import make_importable

        make_importable()
        os.environ["FASER_DEFAULT_K"] = str(task["length"])  # no sidecar: this length always holds
        extra["scheduler_cls"] = "faser.engine_adapter.scheduler.FaserScheduler"
        extra["worker_cls"] = "faser.engine_adapter.worker.FaserWorker"
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=task["target"], load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, seed=0,
        max_num_seqs=task["requests"], enable_prefix_caching=False, enforce_eager=task["is_eager"],
        disable_log_stats=False, **extra,
    )  # fmt: skip
    prompts: Any = [
        {"prompt_token_ids": [2 + (number + at) % 90 for at in range(64)]} for number in range(task["requests"])
    ]
    parameters = SamplingParams(temperature=0.0, max_tokens=task["tokens"], ignore_eos=True, detokenize=False)
    engine.generate(prompts, parameters, use_tqdm=False)
    begun = time.perf_counter()
    answers = engine.generate(prompts, parameters, use_tqdm=False)
    spent = time.perf_counter() - begun
    produced = sum(len(answer.outputs[0].token_ids) for answer in answers)
    drafts = sum(getattr(each, "value", 0) for each in engine.get_metrics() if each.name == DRAFT_TOKENS)
    told = {"tokens_per_s": round(produced / spent, 2), "tokens": produced, "seconds": round(spent, 3)}
    print(json.dumps(told | {"draft_tokens": drafts}))  # of both runs: an arm that drafts nothing measures nothing


if __name__ == "__main__":
    main()
