"""Cost of FASER on the engine thread, per step: `python benchmarks/adapter.py [--copies] [--json]`.

Drives the real adapter (steering, lease, ZeroMQ link, codec) with synthetic steps of 1 to 256 requests against a real
controller socket in another process that answers every record. Prints thread CPU time per step beside the bound of
20 us + 0.7 us per request, in three ways: back to back, each step as soon as the last one is answered; after a pause
of 1 ms, in which the core sleeps; and flushed, with the caches as a forward pass leaves them. The engine's process has
a core of its own, and so has the controller; all ways take turns in blocks of 50 steps, since a shared machine has
slower seconds, and the median of the blocks' medians stands beside their quartiles. No vLLM, so that only the adapter
is measured. `wake_us` is what waking a sleeping thread costs here: a step wakes one, and on a virtual machine that is a
large part of the difference to bare metal.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import zmq
from made_engine import Inbox, hello, summed_up

from faser.engine_adapter import protocol
from faser.engine_adapter.link.engine_link import EngineLink, give_way
from faser.engine_adapter.steering.lease import Lease
from faser.engine_adapter.steering.orders import StepReport
from faser.engine_adapter.steering.sampled_tokens import SampledTokens, delivered_tokens, vllms_count
from faser.engine_adapter.steering.steering import BatchOutcome, Default, Steering

BOUND_US, BOUND_US_PER_REQUEST = 20.0, 0.7
PAUSE_S = 0.001
REQUESTS = (1, 8, 64, 256)
LONGEST = 8  # draft tokens
BLOCK_STEPS, FIRST_STEPS = 60, 10
CACHES = (
    ("back to back", None, 0.0), ("after a pause", None, PAUSE_S), ("flushed", np.zeros(8 << 20), PAUSE_S),
)  # fmt: skip


COPY = protocol.MatchRule([1.0] * LONGEST, [0.0] * LONGEST, [0.1] * LONGEST, LONGEST)


def answer(endpoint: str, match: protocol.MatchRule | None) -> None:
    """Be a controller that answers each record with a length for every request, and when to copy."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(endpoint)
    sequence = 0
    while True:
        identity, frame = socket.recv_multipart()
        message = protocol.decode_from_engine(frame)
        if isinstance(message, protocol.StepRecord):
            sequence += 1
            handles = [row.handle for row in message.rows]
            lengths = [handle % 5 for handle in handles]
            action = protocol.ActionSet(
                message.boot_id, 1, sequence, message.step + 32, message.time_s + 1, 0, handles, lengths, match=match
            )
            socket.send_multipart([identity, protocol.encode(action)])


def steering_with(endpoint: str, requests: int) -> tuple[Steering, list[SimpleNamespace]]:
    """Return an adapter that knows `requests` live requests."""
    introduction = msgspec.structs.replace(hello(f"bench{requests}", k_max=LONGEST, method="ngram"), copy_max=LONGEST)
    boot_id = introduction.boot_id
    lease = Lease(boot_id, LONGEST, 32, 1.0, copy_max=LONGEST)
    steering = Steering(introduction, EngineLink(endpoint, boot_id), lease, Default(0))
    live = [
        SimpleNamespace(
            num_computed_tokens=50,
            max_tokens=100000,
            priority=0,
            num_prompt_tokens=40,
            num_output_tokens=10,
            num_tokens=50,
            num_output_placeholders=0,
        )
        for _ in range(requests)
    ]
    for index, request in enumerate(live):
        steering.arrive(f"chatcmpl-{index:032x}", request)  # type: ignore[arg-type]
    return steering, live


class Engine:
    """An engine that does not exist: its adapter, and steps of so many requests."""

    def __init__(self, endpoint: str, requests: int, has_copies: bool) -> None:
        self._steering, self._live = steering_with(endpoint, requests)
        self._inbox = self._steering.link._inbox = Inbox()  # type: ignore[attr-defined]
        ids = list(self._steering.entries)
        self._scheduled = dict.fromkeys(ids, 5)
        self._sampled = [[1, 2] for _ in ids]
        self._drafts = {request_id: [1, 2, 3, 4] for request_id in ids}
        self._rows = {request_id: row for row, request_id in enumerate(ids)}
        outputs = [SimpleNamespace(request_id=name, new_token_ids=[1, 2]) for name in ids]
        statistics = SimpleNamespace(
            spec_decoding_stats=SimpleNamespace(num_draft_tokens=4 * requests, num_accepted_tokens=requests)
        )
        self._result = {0: SimpleNamespace(outputs=outputs, scheduler_stats=statistics)}
        self._report = StepReport(0.01, 0.001, 0.003, 0.0, 0.015, drafted=[4] * requests)
        self._report.copied = list(range(0, requests, 3)) if has_copies else []
        self._steps = 0

    def serve(self, steps: int, flush: np.ndarray | None, pause_s: float) -> list[tuple[float, bool]]:
        """Return the adapter's thread CPU time in each of some steps, seconds, and whether a lease was in force.

        The first ones are left out.
        """
        return [self._step(flush, pause_s) for _ in range(steps)][FIRST_STEPS:]

    def _step(self, flush: np.ndarray | None, pause_s: float) -> tuple[float, bool]:
        if flush is not None:
            flush += 1  # what a forward pass does to the caches
        if pause_s:
            time.sleep(pause_s)
        if self._steps:
            self._inbox.arrived.wait(0.1)  # like a forward pass, without the interpreter lock
            self._inbox.arrived.clear()
        started_s = time.thread_time()
        order = self._steering.order(self._scheduled, time.monotonic())
        ordered_s = time.thread_time() - started_s
        for request in self._live:
            request.num_output_tokens += 2
        resumed_s = time.thread_time()
        self._steering.record(order, self._digest())
        spent_s = time.thread_time() - resumed_s + ordered_s
        self._steps += 1
        return spent_s, order.lease_epoch > 0

    def _digest(self) -> BatchOutcome:
        """Count a step as the scheduler mixin does."""
        sampled, delivered = SampledTokens.of(self._sampled, is_pruned=False), delivered_tokens(self._result)
        running, counted = len(self._rows), vllms_count(self._result)
        return BatchOutcome(
            self._scheduled, self._drafts, self._rows, sampled, delivered, running, 0, 0.5, self._report, {}, counted
        )

    def close(self) -> None:
        """Say goodbye."""
        self._steering.close()


def measure(endpoint: str, blocks: int, woken_us: float, has_copies: bool) -> list[dict[str, Any]]:
    """Return the adapter's cost by requests and caches: medians, quartiles over blocks, and the p99 of all steps."""
    engines = {requests: Engine(endpoint, requests, has_copies) for requests in REQUESTS}
    cells = [(requests, *ways) for requests in REQUESTS for ways in CACHES]
    costs_us: dict[tuple[int, str], list[list[float]]] = {(requests, name): [] for requests, name, _, _ in cells}
    leases: dict[tuple[int, str], list[bool]] = {(requests, name): [] for requests, name, _, _ in cells}
    for number in range(blocks):
        for requests, name, flush, pause_s in cells[:: -1 if number % 2 else 1]:
            steps = engines[requests].serve(BLOCK_STEPS, flush, pause_s)
            costs_us[requests, name].append([cost_s * 1e6 for cost_s, _ in steps])
            leases[requests, name] += [is_under_lease for _, is_under_lease in steps]
    for engine in engines.values():
        engine.close()
    rows = []
    for (requests, name), found_us in costs_us.items():
        rows.append(
            {
                "requests": requests, "caches": name, "bound_us": BOUND_US + BOUND_US_PER_REQUEST * requests,
                **summed_up(found_us),
                "under_lease": statistics.mean(leases[requests, name]), "wake_us": woken_us,
            }
        )  # fmt: skip
    return rows


def wake_us(times: int = 400) -> float:
    """Return the median thread CPU time of waking a thread that sleeps on an eventfd."""
    wake, is_over = os.eventfd(0), threading.Event()

    def sleep() -> None:
        give_way()
        while not is_over.is_set():
            os.eventfd_read(wake)

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    spent_s = []
    for _ in range(times):
        time.sleep(0.002)
        started_s = time.thread_time()
        os.eventfd_write(wake, 1)
        spent_s.append(time.thread_time() - started_s)
    is_over.set()
    os.eventfd_write(wake, 1)
    sleeper.join()
    os.close(wake)
    return statistics.median(spent_s) * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument(
        "--copies", action="store_true", help="leases say when to copy, and a third of the drafts are copies"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # what was answered before the other cells' turns is stale
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/bench.sock"
        arguments = endpoint, COPY if options.copies else None
        controller = multiprocessing.get_context("spawn").Process(target=answer, args=arguments, daemon=True)
        controller.start()
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(controller.pid or 0, {cores[-1]})
        os.sched_setaffinity(0, {cores[0]})
        time.sleep(1.0)
        woken_us = wake_us()
        rows = measure(endpoint, options.blocks, woken_us, options.copies)
        controller.terminate()
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        low, high = row["p50_quartiles_us"]
        print(
            f"{row['requests']:4d} requests {row['caches']:13s} p50 {row['p50_us']:6.1f} us ({low:.1f} to {high:.1f})"
            f"  p99 {row['p99_us']:6.1f} us  bound {row['bound_us']:5.1f} us  under lease {row['under_lease']:.0%}"
        )
    print(f"of which waking the link's thread {woken_us:.1f} us")


if __name__ == "__main__":
    main()
