"""What a row costs in bfloat16 and in float32 on this CPU: `python benchmarks/precision.py [--json]`.

One thread, one linear layer of the embedded target's shape, as vLLM's CPU build computes it where it has no kernels of
its own: torch's. Where the last column grows with the rows, verifying drafts in bfloat16 costs as much as decoding
them one by one, and models/precision.py chooses float32. Types in turns, medians. Takes seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from faser.models.precision import dtype_on

WIDE, HIDDEN = 1536, 576
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    types = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    weights = {name: torch.randn(WIDE, HIDDEN, dtype=kind) for name, kind in types.items()}
    capability, chosen, found = torch.backends.cpu.get_cpu_capability(), dtype_on("cpu"), []
    for rows in ROWS:
        states = {name: torch.randn(rows, HIDDEN, dtype=kind) for name, kind in types.items()}
        times_us: dict[str, list[float]] = {name: [] for name in types}
        for _ in range(options.times):
            for name in types:
                started = time.perf_counter()
                torch.nn.functional.linear(states[name], weights[name])
                times_us[name].append((time.perf_counter() - started) * 1e6)
        found.append({"rows": rows} | {f"{name}_us": statistics.median(times_us[name]) for name in types})
    if options.json:
        print(json.dumps({"capability": capability, "chosen": chosen, "rows": found}))
        return
    print(f"{capability}: the embedded pair is computed in {chosen}")
    for row in found:
        bfloat16, float32 = row["bfloat16_us"], row["float32_us"]
        print(
            f"{row['rows']:4.0f} rows: bfloat16 {bfloat16:7.0f} us, float32 {float32:7.0f} us, {bfloat16 / float32:.2f}"
        )


if __name__ == "__main__":
    main()
