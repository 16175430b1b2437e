"""Draw predicted against measured step times, per phase: `python benchmarks/profile_plot.py TELEMETRY...`.

TELEMETRY is what `faser profile --telemetry FILE` kept; the fit is repeated as `faser calibrate` does it, and cells
that were never fitted are drawn apart. docs/simulator.md shows the result.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from faser.controller.calibrate import steadied
from faser.controller.measured import read_measured
from faser.env.calibration import Fit, fit_phase
from faser.env.step_basis import Phase
from faser.env.step_samples import StepSamples

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "simulator_steps.svg"


def draw(fits: dict[Phase, Fit], output: Path) -> None:
    """Write the picture: one panel per phase, logarithmic, with lines 12 % off."""
    matplotlib.rcParams["svg.hashsalt"] = "faser"
    figure, panels = plt.subplots(1, len(fits), figsize=(4.6 * len(fits), 4.4))
    for panel, (phase, fit) in zip(np.atleast_1d(panels), fits.items(), strict=True):
        cells = fit.cells
        for is_held_out, colour, label in ((False, "0.7", "fitted"), (True, "tab:blue", "held out")):
            chosen = cells.counts & (cells.held_out == is_held_out)
            panel.loglog(
                1e3 * cells.measured_s[chosen], 1e3 * fit.predicted_s[chosen], "o", ms=3, color=colour,
                label=f"{label}, {int(chosen.sum())} cells",
            )  # fmt: skip
        low, high = 1e3 * cells.measured_s[cells.counts].min(), 1e3 * cells.measured_s[cells.counts].max()
        ends = np.array([low, high])
        panel.plot(ends, ends, color="black", lw=0.8)
        for factor in (1.12, 1 / 1.12):
            panel.plot(ends, ends * factor, color="black", lw=0.5, ls=":")
        errors = fit.errors()
        known = (
            f"median {np.median(errors):.1%}, p90 {np.percentile(errors, 90):.1%}" if len(errors) else "none held out"
        )
        panel.set_title(f"{phase}: {known}", fontsize=10)
        panel.set_xlabel("measured, ms")
        panel.set_ylabel("predicted, ms")
        panel.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None})


def draw_surveys(telemetry: list[Path], output: Path = DEFAULT_OUTPUT) -> None:
    """Fit these files and draw."""
    samples = StepSamples.joined(steadied([read_measured(path) for path in telemetry])[0])
    phases: tuple[Phase, ...] = ("verify", "draft")
    draw({phase: fit_phase(samples, phase) for phase in phases}, output)


def main() -> None:
    """Read, fit, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("telemetry", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    options = parser.parse_args()
    draw_surveys(options.telemetry, options.output)


if __name__ == "__main__":
    main()
