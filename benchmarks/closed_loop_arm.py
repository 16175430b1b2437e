"""One arm of closed_loop.py or swing.py, run as their child: a vLLM engine that serves a stream of prompts in turns.

The child's orders are `record`, `learn`, `begin`, `replay` and `turn` (remote.py). All are held to the same
recorded answers.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import deque
from typing import Any

from held_text import HeldText
from remote import serve

from faser.controller.bench_work import stream_prompts
from faser.controller.launch import SCHEDULER_CLASS, WORKER_CLASS
from faser.models.embedded import ensure_embedded_target
from faser.models.precision import dtype_on, number_bytes

DTYPE = dtype_on("cpu")
KV_BYTES = number_bytes(DTYPE) * 384 << 20  # 64 requests of the longest prompt and answer


class Engine:
    """One arm: a vLLM engine that serves an endless stream of prompts to a constant number of clients."""

    def __init__(self, order: dict[str, Any]) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM

        target = str(ensure_embedded_target())
        named: dict[str, Any] = {}
        if order["speculative"] is not None:
            named["speculative_config"] = order["speculative"]
        if order["is_steered"]:
            named |= {"scheduler_cls": SCHEDULER_CLASS, "worker_cls": WORKER_CLASS}
        # Without the prefix cache a prompt costs the same whenever it comes back.
        llm = LLM(
            target, dtype=DTYPE, enforce_eager=True, max_model_len=2048, max_num_seqs=64,
            enable_prefix_caching=False, kv_cache_memory_bytes=KV_BYTES, disable_log_stats=False, **named,
        )  # fmt: skip
        self.llm = llm
        self.engine: Any = llm.llm_engine
        tokenizer = AutoTokenizer.from_pretrained(target)
        self.prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
            for text in (prompt.text for prompt in stream_prompts(order["max_prompt_tokens"]))
        ]
        self.max_tokens: int = order["max_tokens"]
        self.live: dict[str, list[int]] = {}  # request -> tokens emitted
        self.emitted = self.sent = self.read = 0
        self.unread: dict[str, int] = {}  # request -> tokens of its prompt
        self.answers: dict[int, list[int]] = {}  # by prompt
        self.arrivals: deque[tuple[float, int]] | None = None  # of a replay; None: a constant number of clients
        self.held = HeldText(self.engine.model_executor.driver_worker.worker.model_runner)
        if order["core"] is not None:
            os.sched_setaffinity(0, {order["core"]})  # this thread's alone; those that are there already stay free

    def record(self, order: list[int], at_once: int) -> list[list[int]]:
        """Return this engine's own answers to prompts."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True, detokenize=False)
        found: list[list[int]] = []
        for first in range(0, len(order), at_once):
            asked = [{"prompt_token_ids": self.prompts[place]} for place in order[first : first + at_once]]
            outputs = self.llm.generate(asked, params, use_tqdm=False)
            found += [list(output.outputs[0].token_ids) for output in outputs]
        return found

    def learn(self, order: list[int], answers: list[list[int]]) -> None:
        """Keep the answers that prompts get from now on."""
        self.answers = dict(zip(order, answers, strict=True))

    def begin(self, order: list[int], firsts: list[int]) -> None:
        """Start the clients of a load anew.

        :param order: prompts in the order in which they are sent, over and over
        :param firsts: tokens of each client's first answer: staggered, so that the load is at once as it stays
        """
        self._empty(order)
        self.arrivals = None
        for tokens in firsts:
            self._send(tokens)

    def replay(self, order: list[int], arrivals: list[tuple[float, int]]) -> None:
        """Start a replay anew, on a clock of emitted tokens: so every arm has as many requests running at a token.

        :param arrivals: tokens emitted before each request comes, and tokens of its answer
        """
        self._empty(order)
        self.arrivals = deque(arrivals)
        self._admit()

    def _empty(self, order: list[int]) -> None:
        self.engine.abort_request(list(self.live))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.live, self.unread, self.emitted, self.held.texts = {}, {}, 0, {}
        self.stream = itertools.cycle(order)

    def _admit(self) -> None:
        """Send the requests of a replay that have come by now; with nobody to serve the clock does not stand still."""
        while self.arrivals and (self.arrivals[0][0] <= self.emitted or not self.live):
            self._send(self.arrivals.popleft()[1])

    def _send(self, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.sent += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        place, name = next(self.stream), str(self.sent)
        self.held.texts[name] = self.answers[place]
        self.engine.add_request(name, {"prompt_token_ids": self.prompts[place]}, params)
        self.live[name], self.unread[name] = [], len(self.prompts[place])

    def step(self) -> None:
        """Run one engine step; a client whose answer is done sends its next prompt, unless arrivals are replayed."""
        for output in self.engine.step():
            self.emitted += len(output.outputs[0].token_ids)
            self.read += self.unread.pop(output.request_id, 0)
            said = self.live[output.request_id]
            said += output.outputs[0].token_ids
            if output.finished:
                if said != self.held.texts.pop(output.request_id)[: len(said)]:
                    raise RuntimeError(f"request {output.request_id} left the text that it is held to")
                del self.live[output.request_id]
                if self.arrivals is None:
                    self._send(self.max_tokens)
        self._admit()

    def turn(self, until: int) -> dict[str, float]:
        """Serve until so many tokens are emitted since the start, a step at least; return what it took."""
        tokens, drafting, sent, read = self.emitted, self._drafting(), self.sent, self.read
        began_s, cpu_s, steps = time.perf_counter(), time.process_time(), 0
        step_began_s, prompt_steps, prompt_steps_s, plain_first_s = began_s, 0, 0.0, 0.0
        while self.live and (self.emitted < until or not steps):
            known = self.read
            self.step()
            ended_s = time.perf_counter()
            if self.read > known:
                prompt_steps, prompt_steps_s = prompt_steps + 1, prompt_steps_s + ended_s - step_began_s
            elif not steps:
                plain_first_s = ended_s - began_s
            steps, step_began_s = steps + 1, ended_s
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        after = self._drafting()
        return {
            "seconds": seconds, "cpu_s": cpu_s, "steps": steps, "tokens": self.emitted - tokens,
            "requests": self.sent - sent, "prompt_tokens": self.read - read,
            "prompt_steps": prompt_steps, "prompt_steps_s": prompt_steps_s,
            "plain_firsts": int(plain_first_s > 0.0), "plain_firsts_s": plain_first_s,
            **{name: after[name] - drafting[name] for name in after},
        }  # fmt: skip

    def _drafting(self) -> dict[str, int]:
        """Return vLLM's own counters."""
        names = {"draft_tokens": 0, "accepted_tokens": 0}
        for metric in self.llm.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_num_")
            if name in names:
                names[name] += int(metric.value)
        return names


if __name__ == "__main__":
    _, flag, order = sys.argv
    assert flag == "--child"
    serve(Engine(json.loads(order)))
