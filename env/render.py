"""Pictures of an episode: load, draft lengths and goodput over time. Called by the gymnasium environment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..engine_adapter.arrays import Floats

Moments = Sequence[tuple[float, ...]]  # (seconds, running, waiting, mean draft length, tokens/s, good tokens/s)

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 40


def ansi(moments: Moments) -> str:
    """Return one line per curve: its last value and its course."""
    if not moments:
        return "no steps yet"
    columns = np.array(moments).T
    names = ("running", "waiting", "draft length", "tokens/s", "good tokens/s")
    lines = [f"{columns[0, -1]:9.2f} s, step {len(moments)}"]
    lines += [f"{name:>13} {values[-1]:9.2f} {_bars(values)}" for name, values in zip(names, columns[1:], strict=True)]
    return "\n".join(lines)


def _bars(values: Floats) -> str:
    parts = np.array_split(values, min(_WIDTH, len(values)))
    means = np.array([part.mean() for part in parts])
    scaled = means / max(float(means.max()), 1e-12) * (len(_BARS) - 1)
    return "".join(_BARS[int(value)] for value in np.clip(scaled.round(), 0, len(_BARS) - 1))


def picture(moments: Moments) -> npt.NDArray[np.uint8]:
    """Return an image, (height, width, 3) uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = np.array(moments).T if moments else np.zeros((6, 1))
    time_s = columns[0]
    figure = Figure(figsize=(6.4, 6.4), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True)
    axes[0].plot(time_s, columns[1], label="running")
    axes[0].plot(time_s, columns[2], label="waiting")
    axes[0].set_ylabel("requests")
    axes[1].plot(time_s, columns[3], color="tab:green")
    axes[1].set_ylabel("draft length, tokens")
    axes[2].plot(time_s, _smooth(columns[4]), label="tokens/s", color="tab:grey")
    axes[2].plot(time_s, _smooth(columns[5]), label="in time", color="tab:orange")
    axes[2].set_xlabel("s")
    for axis in (axes[0], axes[2]):
        axis.legend(loc="upper left", fontsize=8)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels: npt.NDArray[np.uint8] = np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]
    return pixels


def _smooth(values: Floats) -> Floats:
    width = max(len(values) // 50, 1)
    return np.asarray(np.convolve(values, np.ones(width) / width, mode="same"), np.float64)
