"""The gymnasium environments on the simulator: `faser/SpeculativeServing-v0`, alone and as a vector.

Importing this module registers the environment. Needs gymnasium (extra `train`); the sidecar and the engine do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from ..engine_adapter.arrays import Bools, Floats, Singles
from .layout.action_vector import ACTION, require_numbers
from .layout.observation import GLOBAL_FEATURES, REQUEST_FEATURES, Feature
from .layout.reward import discount
from .simulator.scenario import Scenario
from .simulator.simulator import Simulator
from .simulator.state import TERMS

ENV_ID = "faser/SpeculativeServing-v0"

Observations = dict[str, Singles]
Moments = Sequence[tuple[float, ...]]  # (seconds, running, waiting, mean draft length, tokens/s, good tokens/s)

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 40


def observation_space(slots: int) -> spaces.Dict:
    """Return the space of one engine's observation."""
    low, high = bounds(REQUEST_FEATURES)
    return spaces.Dict(
        {
            "globals": spaces.Box(*bounds(GLOBAL_FEATURES), dtype=np.float32),
            "requests": spaces.Box(np.tile(low, (slots, 1)), np.tile(high, (slots, 1)), dtype=np.float32),
        }
    )


def bounds(features: tuple[Feature, ...]) -> tuple[Singles, Singles]:
    """Return the lowest and highest values, (features,) each."""
    return (
        np.array([feature.low for feature in features], np.float32),
        np.array([feature.high for feature in features], np.float32),
    )


def action_space() -> spaces.Box:
    """Return the space of one engine's action."""
    return spaces.Box(-1.0, 1.0, (len(ACTION),), np.float32)


class SpeculativeServingEnv(gymnasium.Env[Observations, Singles]):
    """TABLES"""

    metadata = {"render_modes": ["rgb_array", "ansi"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, scenario: Scenario | None = None, render_mode: str | None = None) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode {render_mode!r}; expected None, 'rgb_array' or 'ansi'")
        self.render_mode = render_mode
        self.scenario = scenario or Scenario()
        self.observation_space = cast(Any, observation_space(self.scenario.slots))
        self.action_space = cast(Any, action_space())
        self._simulator = Simulator(self.scenario, 1, copies=True)
        self._seed: int | None = None  # that what the simulator meets follows from
        self._history: list[tuple[float, ...]] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin an episode; with a seed, all that follows depends on seed and actions alone.

        Without one the first episode draws it, `np_random_seed` tells it, and later episodes go on from there.
        """
        super().reset(seed=seed)
        if seed is not None or self._seed != self.np_random_seed:
            self._seed = self.np_random_seed
            self._simulator.seed(seed_of(self._seed, self.np_random))
        self._simulator.reset()
        self._simulator.warm()
        self._history.clear()
        return observations(self._simulator, 0), self._info()

    def step(self, action: Singles) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Simulate one engine step; raise ValueError for an action that holds NaN or infinity."""
        reward = float(self._simulator.step(require_numbers(action))[0])
        if self.render_mode is not None:
            self._history.append(moment(self._simulator, 0))
        truncated = bool(is_over(self._simulator)[0])
        return observations(self._simulator, 0), reward, False, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        return {name: float(values[0]) for name, values in step_infos(self._simulator).items()}

    def render(self) -> Any:
        """Draw load, lengths and goodput of the episode so far: an image, or a line of text."""
        if self.render_mode == "ansi":
            return ansi(self._history)
        return picture(self._history) if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Free what the simulator holds."""
        self._simulator.close()


class SpeculativeServingVectorEnv(VectorEnv[Observations, Singles, npt.NDArray[Any]]):
    """Many engines as one gymnasium vector environment; see SpeculativeServingEnv for what each of them is.

    An episode that ends begins anew in the same step: the observation is the new episode's, `info["final_obs"]` and
    `info["final_info"]` hold what the old one ended with (AutoresetMode.SAME_STEP).
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 64, scenario: Scenario | None = None, threads: int = 1, **_: Any) -> None:
        self.num_envs = num_envs
        self.scenario = scenario or Scenario()
        self.single_observation_space = observation_space(self.scenario.slots)
        self.single_action_space = action_space()
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self._simulator = Simulator(self.scenario, num_envs, threads=threads, copies=True)
        self._seed: int | None = None  # that what the simulator meets follows from

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin an episode everywhere; one seed for all: engines differ by their place.

        Without one the first episode draws it, `np_random_seed` tells it, and later episodes go on from there.
        """
        if isinstance(seed, list):
            seed = next((each for each in seed if each is not None), None)
        super().reset(seed=seed)
        if seed is not None or self._seed != self.np_random_seed:
            self._seed = self.np_random_seed
            self._simulator.seed(seed_of(self._seed, self.np_random))
        self._simulator.reset()
        self._simulator.warm()
        return observations(self._simulator), step_infos(self._simulator)

    def step(
        self, actions: Singles
    ) -> tuple[Observations, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        """Simulate one step of every engine; raise ValueError for actions that hold NaN or infinity."""
        rewards = self._simulator.step(require_numbers(actions)).copy()
        over = is_over(self._simulator)
        infos = step_infos(self._simulator)
        if over.any():
            infos["final_obs"] = observations(self._simulator)
            infos["final_info"] = {name: values.copy() for name, values in infos.items() if name != "final_obs"}
            infos["_final_obs"] = infos["_final_info"] = over
            ended = np.flatnonzero(over)
            self._simulator.reset(ended)
            self._simulator.warm(ended)
        return observations(self._simulator), rewards, np.zeros_like(over), over, infos

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads."""
        self._simulator.close()


def seed_of(known: int | None, random: np.random.Generator) -> int:
    """Return the seed of a simulator: gymnasium's, or a draw from a generator that a caller set."""
    return known if known is not None and known >= 0 else int(random.integers(1 << 63))


def observations(simulator: Simulator, engine: int | None = None) -> Observations:
    """Return copies of what all engines show, or one."""
    every = slice(None) if engine is None else engine
    return {
        "globals": simulator.state.globals[every].copy(),
        "requests": np.ascontiguousarray(simulator.requests()[every]),
    }


def is_over(simulator: Simulator) -> Bools:
    """Return (engines,) whose episode is long enough; the step before the first observation does not count."""
    over: Bools = simulator.state.engines["steps"] > simulator.scenario.episode_steps
    return over | simulator.is_done


def step_infos(simulator: Simulator) -> dict[str, Any]:
    """Return the reward's terms, the seconds that passed and the factor on what comes after, (engines,) each."""
    infos: dict[str, Any] = {name: simulator.state.terms[:, k].copy() for k, name in enumerate(TERMS)}
    infos["elapsed_s"] = simulator.state.engines["elapsed_s"].copy()
    infos["discount"] = discount(infos["elapsed_s"], simulator.scenario.weights.discount_per_s)
    return infos


def moment(simulator: Simulator, engine: int) -> tuple[float, ...]:
    """Return (seconds, running, waiting, mean draft length, tokens/s, good tokens/s) of the step just simulated."""
    record, terms = simulator.state.engines[engine], simulator.state.terms[engine]
    decoding = max(int(record["decode_tokens"]), 1)
    elapsed_s = max(float(record["elapsed_s"]), 1e-9)
    return (
        float(record["clock_s"]), float(record["running"]), float(record["waiting"]),
        float(record["draft_tokens"]) / decoding, float(terms[1]) / elapsed_s, float(terms[0]) / elapsed_s,
    )  # fmt: skip


def _table(features: tuple[Feature, ...]) -> str:
    lines = ["    | Num | Observation | Min | Max | Meaning, unit |", "    |---|---|---|---|---|"]
    lines += [f"    | {k} | {f.name} | {f.low:g} | {f.high:g} | {f.unit} |" for k, f in enumerate(features)]
    return "\n".join(lines)


_ACTIONS = "\n".join(
    ["    | Num | Action | Min | Max | Means, in its unit | Meaning |", "    |---|---|---|---|---|---|"]
    + [
        f"    | {k} | {c.name} | -1 | 1 | {c.low:g} to {c.high:g}, {c.unit} | {c.meaning} |"
        for k, c in enumerate(ACTION)
    ]
)

# Built from the layouts themselves, so that it cannot say something else.
SpeculativeServingEnv.__doc__ = f"""
    A language model server with speculative decoding, one engine step per environment step.

    ## Description
    Requests arrive in an open loop, wait, and are served in one continuous batch with chunked prefill and paged KV
    blocks. In each step the engine verifies the drafts of the step before, emits tokens, and drafts anew. The agent
    says at which price requests draft. Step times come from an engine profile, acceptance from a model of the drafter
    and its confidence. Pruning, overlap and splits are parametric and without effect unless a profile has them; where a
    profile has matches, drafts are also copied from requests' own texts, at the action's price.

    ## Action Space
    `Box(-1, 1, ({len(ACTION)},), float32)`. -1 is the lowest meaning, 1 the highest, linear between.

{_ACTIONS}

    ## Observation Space
    `Dict` of `globals`, `Box(({len(GLOBAL_FEATURES)},), float32)`:

{_table(GLOBAL_FEATURES)}

    and `requests`, `Box((slots, {len(REQUEST_FEATURES)}), float32)`, a row per slot of the batch, 0 where it is empty;
    the order of rows carries no meaning:

{_table(REQUEST_FEATURES)}

    ## Rewards
    w_good * good tokens + w_token * tokens - w_request * request-seconds - w_waste * wasted rows, spread evenly over
    the step and discounted within it; see env/layout/reward.py. Steps last unequal times: what comes after a step is
    worth `info["discount"]` = exp(-rho * elapsed_s). `info` holds the terms separately: {", ".join(TERMS)}.

    ## Starting State
    An empty engine, after one step without drafts. Engine, workload, place in it, load, its drift, difficulty and cost
    coefficients are drawn from the ranges of the scenario. A `reset` without a seed draws one where none was given
    before; `np_random_seed` tells it.

    ## Episode End
    Never terminated: serving goes on. Truncated after `scenario.episode_steps` steps, or when a workload that does not
    repeat is served.

    ## Arguments
    `scenario`: a `faser.env.simulator.scenario.Scenario`. `render_mode`: `rgb_array`, `ansi` or none.

    ## Version History
    v0: first.
"""


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


gymnasium.register(
    id=ENV_ID,
    entry_point="faser.env.speculative_serving:SpeculativeServingEnv",
    vector_entry_point="faser.env.speculative_serving:SpeculativeServingVectorEnv",
)
