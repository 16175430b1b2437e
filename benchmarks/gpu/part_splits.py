"""Splits: which SMs each partition really runs on, and how drafting and verifying get in each other's way on it.

The SMs are seen by a kernel that notes its own: it checks what the driver says of its split, and that a CUDA graph
stays on the context it was captured on.
"""

from __future__ import annotations

import time
from typing import Any

import part_overlap
import torch
import triton
import triton.language as tl
from machines import CudaMachine, Machine, machine_for, sizes
from pair import pair_for

from faser.engine_adapter.partition.shares import PHASES, READY_MADE, Partition, make_ready

PROGRAMS = 4096
TURNS = 2000  # so that a program holds its SM until all others have begun


@triton.jit
def _where_am_i(out, turns):
    program = tl.program_id(0)
    number = program + tl.zeros([32], dtype=tl.int32)
    seen = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip
    busy = number.to(tl.float32)
    for _ in range(turns):
        busy = busy * 0.999 + 1.0
    tl.store(out + program, tl.max(seen + tl.where(busy < 0.0, 1, 0), axis=0))


def measure(is_dry: bool) -> dict[str, Any]:
    """Return the partitions as the device has them, and the interference table by requests."""
    machine = machine_for(is_dry)
    partitions = shares(machine)
    pair = pair_for(machine, (1,) if is_dry else (1, 32))
    table = {f"{requests}": part_overlap.times(pair, requests) for requests in pair.sizes.requests}
    return {"partitions": partitions, "requests": table}


def shares(machine: Machine) -> dict[str, Any]:
    """Return for each partition the SMs asked for, allocated and seen, and those that both phases were seen on."""
    found: dict[str, Any] = {"refused": list(machine.partitions.refused), "partitions": {}}
    for partition in machine.partitions.ready:
        own: dict[str, Any] = {"asked": sizes(partition), "allocated": sizes(partition, is_allocated=True)}
        if isinstance(machine, CudaMachine):
            seen = {phase: _seen(machine, partition, phase) for phase in PHASES}
            own["seen"] = [len(seen[phase]) for phase in PHASES]
            own["seen_by_both"] = len(seen["draft"] & seen["verify"])
        found["partitions"][partition.name] = own
    if isinstance(machine, CudaMachine):
        found["create_ms"] = _create_ms(machine)
    return found


def _seen(machine: CudaMachine, partition: Partition, phase: Any) -> set[int]:
    """Return the SMs that a captured launch ran on, replayed on the phase's stream."""
    out = torch.full((PROGRAMS,), -1, dtype=torch.int32, device=machine.device)

    def look() -> None:
        _where_am_i[(PROGRAMS,)](out, TURNS, num_warps=1)

    machine.capture(partition, phase, "where", look)
    out.fill_(-1)
    with partition.side_by_side():
        machine.launch(partition, phase, "where")
    machine.wait()
    machine.forget()
    return set(out.tolist())


def _create_ms(machine: CudaMachine) -> float:
    """Return the time that a second set of all partitions takes to make, per partition."""
    from faser.engine_adapter.partition.cuda import CudaDevice

    begun = time.perf_counter()
    made = make_ready(CudaDevice(0), READY_MADE)
    spent = time.perf_counter() - begun
    made.close()
    return round(1e3 * spent / len(made.ready), 4)
