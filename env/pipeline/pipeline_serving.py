"""The gymnasium environment of the pipeline world, `faser/PipelineServing-v0`. Importing this module registers it.

Needs gymnasium (extra `train`); the sidecar and the engine do not.
"""

from __future__ import annotations

from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from ...engine_adapter.arrays import Ints, Singles
from .arrivals import LOADS, draw_arrivals
from .cluster import Cluster
from .constants import STAGES, PipelineConstants
from .pipeline_actions import ACTION_SIZES, MODES, move_of
from .view import MOVES, PIPELINE_FEATURES

PIPELINE_ENV_ID = "faser/PipelineServing-v0"
_STARTS = ((4, 2), (4, 4), (8, 1), (8, 2), (16, 1), (32, 1))  # pipelines at the beginning: stages, how many


class PipelineServingEnv(gymnasium.Env[Singles, Ints]):
    """TABLES"""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self,
        loads: tuple[str, ...] = LOADS,
        duration_s: float = 600.0,
        constants: PipelineConstants | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode {render_mode!r}; expected None or 'ansi'")
        self.render_mode = render_mode
        self.loads, self.duration_s = loads, duration_s
        self.constants = constants or PipelineConstants()
        count = len(PIPELINE_FEATURES)
        self.observation_space = cast(Any, spaces.Box(0.0, 1.0, (count,), np.float32))
        self.action_space = cast(Any, spaces.MultiDiscrete(list(ACTION_SIZES)))
        self.cluster: Cluster | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Singles, dict[str, Any]]:
        """Begin an episode with a load, its arrivals, other models' memory and pipelines drawn anew."""
        super().reset(seed=seed)
        load = self.loads[int(self.np_random.integers(len(self.loads)))]
        drawn = int(self.np_random.integers(1 << 31))
        start = _STARTS[int(self.np_random.integers(len(_STARTS)))]
        arrivals = draw_arrivals(load, drawn, self.duration_s)
        self.cluster = Cluster(arrivals, start, self.constants, drawn)
        return self.cluster.view().vector(), {"load": load}

    def step(self, action: Ints) -> tuple[Singles, float, bool, bool, dict[str, Any]]:
        """Begin the move that the action means, and serve until the next decision."""
        cluster = self.cluster
        if cluster is None:
            raise RuntimeError("step before reset; expected reset first")
        gpu_s = cluster.totals.gpu_s
        moved_bytes = cluster.apply(move_of(action))
        missed = cluster.advance(cluster.now_s + self.constants.decision_s)
        gpu_s = cluster.totals.gpu_s - gpu_s
        info = {"missed": missed, "gpu_s": gpu_s, "moved_bytes": moved_bytes}
        reward = -self.constants.cost(missed, gpu_s, moved_bytes)
        return cluster.view().vector(), reward, False, cluster.now_s >= self.duration_s, info

    def render(self) -> Any:
        """Return a line of text with time, pipelines and queue."""
        if self.render_mode != "ansi" or self.cluster is None:
            return None
        view = self.cluster.view()
        pipelines = " ".join(f"{count}x{g}" for g, count in zip(STAGES, view.serving, strict=True) if count)
        return f"{view.now_s:7.0f} s  {pipelines}  {view.gpus_held} GPUs  {view.waiting} waiting"


_FEATURES = "\n".join(
    ["    | Num | Observation | Min | Max | Meaning, unit |", "    |---|---|---|---|---|"]
    + [f"    | {k} | {f.name} | {f.low:g} | {f.high:g} | {f.unit} |" for k, f in enumerate(PIPELINE_FEATURES)]
)

# Built from the layout itself, so that it cannot say something else.
PipelineServingEnv.__doc__ = f"""
    A cluster that serves one model by pipelines of 4, 8, 16 or 32 stages; one decision a second.

    ## Description
    Requests arrive in an open loop and wait in one queue. Every pipeline takes batches at its first stage; a batch goes
    through stages 2.1 ms apart. Times are those of FlexPipe's Table 2 (arXiv 2510.11938); what the paper leaves open is
    named in env/pipeline/constants.py. Stages lie on GPUs that other models fill in part, never two on one GPU. A new
    pipeline loads for 5 to 47 s, less where servers have its weights in memory; one that serves can be given another
    number of stages while it serves, at the price of the bytes that change their GPU.

    ## Action Space
    `MultiDiscrete({list(ACTION_SIZES)})`:

    | Num | Action | Values |
    |---|---|---|
    | 0 | stages | {", ".join(map(str, STAGES))} |
    | 1 | change | {", ".join(map(str, MOVES))}: pipelines of so many stages to add or release; 0 changes nothing |
    | 2 | mode | {" / ".join(MODES)}: in place, as many of the others get so many stages |

    ## Observation Space
    `Box(0, 1, ({len(PIPELINE_FEATURES)},), float32)`:

{_FEATURES}

    ## Rewards
    -(requests behind their objective + {PipelineConstants().gpu_weight:g} * GPU seconds + seconds of moved bytes on a
    link); `info` holds the terms.

    ## Starting State
    A load of `loads`, its arrivals, the GPUs' other models and one of a few small sets of pipelines, all drawn.

    ## Episode End
    Never terminated: serving goes on. Truncated after `duration_s`.

    ## Arguments
    `loads`: names of faser.env.pipeline.arrivals.LOADS. `duration_s`: of an episode. `constants`: a
    faser.env.pipeline.constants.PipelineConstants. `render_mode`: `ansi` or none.

    ## Version History
    v0: first.
"""

gymnasium.register(id=PIPELINE_ENV_ID, entry_point="faser.env.pipeline.pipeline_serving:PipelineServingEnv")
