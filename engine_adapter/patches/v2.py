"""Private names of vLLM's V2 model runner.

The hooks translate private calls into the public hooks of FASER's mixin and do nothing by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RunnerV2Hooks:
    """Mixin in front of vLLM's V2 runner: sampling, named."""

    def around_sample(self, sample: Callable[[], Any], input_batch: Any) -> Any:
        """Run the (rejection) sampler over the batch."""
        return sample()

    def sample(self, hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Route vLLM's sampling through `around_sample`."""
        inherited = super().sample  # type: ignore[misc]
        return self.around_sample(lambda: inherited(hidden_states, input_batch, *args, **kwargs), input_batch)


def is_dummy(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Tell whether `execute_model` was called for warm-up, capture or an idle rank (arguments after the first)."""
    return bool(keywords.get("dummy_run", arguments[1] if len(arguments) > 1 else False))


def before_forward(runner: Any, hook: Callable[[], None]) -> None:
    """Call `hook` each time right before the target's forward pass is launched."""
    timing = runner.step_timing
    inherited = timing.forward_start

    def forward_start() -> None:
        hook()
        inherited()

    timing.forward_start = forward_start


def around_propose(runner: Any, hook: Callable[[Callable[[], Any], Any, int | None], Any]) -> bool:
    """Route drafting through `hook(propose, batch, rounds)`, dummy runs excepted; False on a rank without a drafter."""
    speculator = runner.speculator
    if speculator is None:
        return False
    inherited = speculator.propose

    def propose(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return inherited(batch, *args, **kwargs)
        return hook(lambda: inherited(batch, *args, **kwargs), batch, kwargs.get("num_speculative_tokens"))

    speculator.propose = propose
    return True


def inner_output(output: Any) -> Any:
    """Return the ModelRunnerOutput inside vLLM's asynchronous output, None if there is none yet."""
    return getattr(output, "model_runner_output", None)


def on_delivery(output: Any, hook: Callable[[], None]) -> None:
    """Call `hook` after the output has reached the host, in whichever thread vLLM fetches it.

    The object's class is replaced by a subclass rather than a bound closure being hung on it: that would be a
    reference cycle, and would keep the step's GPU tensors until the next garbage collection.
    """
    output.faser_hook = hook
    output.__class__ = _delivering(type(output))


_DELIVERING: dict[type, type] = {}


def _delivering(base: type) -> type:
    if base not in _DELIVERING:

        def get_output(self: Any) -> Any:
            result = base.get_output(self)  # type: ignore[attr-defined]
            self.faser_hook()
            return result

        _DELIVERING[base] = type(base.__name__, (base,), {"get_output": get_output, "__doc__": base.__doc__})
    return _DELIVERING[base]


def sampling_rows(input_batch: Any) -> list[bool]:
    """Return for each batch row whether it has its whole prompt after this step (host arrays, no sync)."""
    reached = input_batch.num_computed_prefill_tokens_np + input_batch.num_scheduled_tokens
    rows: list[bool] = (reached >= input_batch.prefill_len_np).tolist()
    return rows
