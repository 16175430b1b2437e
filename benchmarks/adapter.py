"""Cost of FASER on the engine thread, per step: `python benchmarks/adapter.py [--json]`.

Drives the real adapter (steering, lease, ZeroMQ link, codec) with synthetic steps of 1 to 256 requests against a real
controller socket in another process that answers every record. Prints thread CPU time per step beside the bound of
20 us + 0.7 us per request, in three ways: back to back, each step as soon as the last one is answered; after a pause
of 1 ms, in which the core sleeps; and flushed, with the caches as a forward pass leaves them. No vLLM, so that only the
adapter is measured. `wake_us` is what waking a sleeping thread costs here: a step wakes one, and on a virtual machine
that is most of the difference to bare metal.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from types import SimpleNamespace

import numpy as np
import zmq

from faser.engine_adapter import protocol
from faser.engine_adapter.lease import Lease
from faser.engine_adapter.link import EngineLink
from faser.engine_adapter.steering import BatchOutcome, Default, Steering
from faser.engine_adapter.steps import StepReport

BOUND_US, BOUND_US_PER_REQUEST = 20.0, 0.7
PAUSE_S = 0.001
CACHES = (
    ("back to back", None, 0.0), ("after a pause", None, PAUSE_S), ("flushed", np.zeros(8 << 20), PAUSE_S),
)  # fmt: skip


def answer(endpoint: str) -> None:
    """Be a controller that answers each record with a length for every request."""
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
                message.boot_id, 1, sequence, message.step + 32, message.time_s + 1, 0, handles, lengths
            )
            socket.send_multipart([identity, protocol.encode(action)])


def steering_with(endpoint: str, requests: int) -> tuple[Steering, list[SimpleNamespace]]:
    """Return an adapter that knows `requests` live requests."""
    hello = protocol.Hello(
        boot_id=f"bench{requests}", pid=0, host="", adapter_version="", vllm_version="", model="", device="cpu",
        runner="v1", is_async=False, method="ngram", drafter="", k_max=8, default_length=0, default_table=[],
        max_requests=256, max_batched_tokens=2048, kv_tokens=0, graph_sizes=[], splits=["unsplit"], exit_layers=[],
        tensor_parallel=1, pipeline_parallel=1, data_parallel=1, data_parallel_rank=0, lease_steps=32, lease_ms=1000,
        roster=[],
    )  # fmt: skip
    steering = Steering(hello, EngineLink(endpoint, hello.boot_id), Lease(hello.boot_id, 8, 32, 1.0), Default(0))
    live = [
        SimpleNamespace(
            num_computed_tokens=50, max_tokens=100000, priority=0, num_prompt_tokens=40, num_output_tokens=10
        )
        for _ in range(requests)
    ]
    for index, request in enumerate(live):
        steering.arrive(f"chatcmpl-{index:032x}", request)  # type: ignore[arg-type]
    return steering, live


def until_answered(steering: Steering) -> None:
    """Let other threads run until the controller's answer is there; like a forward pass, without the lock."""
    deadline_s = time.monotonic() + 0.1
    while not steering.link._inbox and time.monotonic() < deadline_s:
        time.sleep(0)


def measure(endpoint: str, requests: int, steps: int, flush: np.ndarray | None, pause_s: float) -> dict[str, float]:
    """Return p50 and p99 of the adapter's thread CPU time per step, microseconds."""
    steering, live = steering_with(endpoint, requests)
    ids = list(steering.entries)
    scheduled = dict.fromkeys(ids, 5)
    drafts = {request_id: [1, 2, 3, 4] for request_id in ids}
    row_of = {request_id: row for row, request_id in enumerate(ids)}
    sampled = [[1, 2]] * requests
    report = StepReport(0.01, 0.001, 0.003, 0.0, 0.015, drafted=[4] * requests)
    costs, under_lease = [], 0
    for step in range(steps):
        if flush is not None:
            flush += 1  # what a forward pass does to the caches
        if pause_s:
            time.sleep(pause_s)
        if step:
            until_answered(steering)
        started = time.thread_time()
        order = steering.order(scheduled, time.monotonic())
        for request in live:
            request.num_output_tokens += 2
        middle = time.thread_time()
        outcome = BatchOutcome(scheduled, drafts, row_of, sampled, requests, 0, 0.5, report)
        resumed = time.thread_time()
        steering.record(order, outcome)
        costs.append((time.thread_time() - resumed) + (middle - started))
        under_lease += order.lease_epoch > 0
    steering.close()
    costs_us = [cost * 1e6 for cost in costs[20:]]
    return {
        "p50_us": statistics.median(costs_us),
        "p99_us": float(np.percentile(costs_us, 99)),
        "under_lease": under_lease / steps,
    }


def wake_us(times: int = 400) -> float:
    """Return the median thread CPU time of waking a thread that sleeps on an eventfd."""
    wake, is_over = os.eventfd(0), threading.Event()

    def sleep() -> None:
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
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/bench.sock"
        controller = multiprocessing.get_context("spawn").Process(target=answer, args=(endpoint,), daemon=True)
        controller.start()
        time.sleep(1.0)
        woken_us = wake_us()
        for requests in (1, 8, 64, 256):
            for name, flush, pause_s in CACHES:
                figures = measure(endpoint, requests, options.steps, flush, pause_s)
                bound = BOUND_US + BOUND_US_PER_REQUEST * requests
                rows.append({"requests": requests, "caches": name, "bound_us": bound, **figures, "wake_us": woken_us})
                if not options.json:
                    print(
                        f"{requests:4d} requests {name:13s} p50 {figures['p50_us']:7.1f} us"
                        f"  p99 {figures['p99_us']:7.1f} us  bound {bound:6.1f} us"
                        f"  under lease {figures['under_lease']:.0%}"
                    )
        controller.terminate()
    if not options.json:
        print(f"of which waking the link's thread {woken_us:.1f} us")
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
