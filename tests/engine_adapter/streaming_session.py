"""One streaming-input session of three turns on a real engine, steered at random; run by test_streaming_session.py.

Prints as JSON how many tokens the client got, how many FASER's records say, and what events say of the end and of
objectives: behind the session come a request with nonsense for one, and a request with two.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from gauntlet import QUESTIONS, RandomController

TURNS = 3
TOKENS = 20  # of each turn


async def serve(target: str, drafter: str, controller: RandomController) -> dict[str, Any]:
    """Serve the session; return its counts."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=target,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=4,
            speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": 4},
            scheduler_cls="faser.engine_adapter.scheduler.FaserScheduler",
            worker_cls="faser.engine_adapter.worker.FaserWorker",
        )
    )
    tokenizer: Any = engine.get_tokenizer()
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    got: list[int] = []

    async def turns() -> AsyncIterator[StreamingInput]:
        for turn in range(TURNS):
            prompt: Any = {"type": "token", "prompt_token_ids": tokenizer.encode(QUESTIONS[turn])}
            yield StreamingInput(prompt=prompt, sampling_params=params)
            while len(got) < TOKENS * (turn + 1):
                await asyncio.sleep(0.05)

    async for output in engine.generate(turns(), params, "session"):
        got += [token for sample in output.outputs for token in sample.token_ids]
    for name, asked in (("odd", {"faser_ttft_ms": "soon"}), ("last", {"faser_ttft_ms": "900", "faser_tpot_ms": 40.5})):
        async for _ in engine.generate("one", SamplingParams(max_tokens=2, extra_args=asked), name):
            pass  # events ride on records
    await asyncio.sleep(1.0)
    engine.shutdown()
    return {"delivered": len(got), **told(controller)}


def told(controller: RandomController) -> dict[str, Any]:
    """Return what the records say of the first request."""
    rows = [row for record in controller.records for row in record.rows if row.handle == 1]
    ends = [event.tokens for record in controller.records for event in record.events
            if event.handle == 1 and event.kind in ("finish", "abort")]  # fmt: skip
    return {
        "emitted": sum(row.emitted for row in rows),
        "accepted": sum(row.accepted for row in rows),
        "ends": ends,
        "objectives": [(event.request_id.partition("-")[0], event.ttft_ms, event.tpot_ms)
                       for record in controller.records for event in record.events if event.kind == "arrival"],
        "rejected": controller.records[-1].rejected,
        "miscounted": controller.records[-1].miscounted,
    }  # fmt: skip


def main() -> None:
    """Serve with a controller in a thread."""
    controller = RandomController(os.environ["FASER_ENDPOINT"], 1, [], True)
    controller.start()
    counts = asyncio.run(serve(*sys.argv[1:3], controller))
    print("COUNTS", json.dumps(counts))


if __name__ == "__main__":
    main()
