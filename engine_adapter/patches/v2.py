"""Private names of vLLM's V2 model runner.

The hooks translate private calls into the public hooks of FASER's mixin and do nothing by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
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


@dataclass(frozen=True, slots=True)
class Proposal:
    """One call of a speculator's `propose`: running it, and what it is given."""

    run: Callable[[], Any]
    batch: Any  # vLLM's InputBatch
    rounds: int | None
    named: Callable[[], dict[str, Any]]  # its arguments by name
    propose: Callable[..., Any]  # the speculator's own, for other arguments


def around_propose(runner: Any, hook: Callable[[Proposal], Any]) -> bool:
    """Route drafting through a hook, dummy runs excepted; False on a rank without a drafter."""
    speculator = runner.speculator
    if speculator is None:
        return False
    inherited = speculator.propose
    form = signature(inherited)

    def propose(*args: Any, **kwargs: Any) -> Any:
        def named() -> dict[str, Any]:
            bound = form.bind(*args, **kwargs)
            bound.apply_defaults()
            return bound.arguments

        if kwargs.get("dummy_run"):  # which vLLM calls with names only
            return inherited(*args, **kwargs)
        rounds = kwargs.get("num_speculative_tokens")
        return hook(Proposal(lambda: inherited(*args, **kwargs), args[0], rounds, named, inherited))

    speculator.propose = propose
    return True


def watch_ends(runner: Any, note: Callable[[int], None]) -> None:
    """Call `note(slot)` behind each request that ends or is preempted."""
    states = runner.req_states
    inherited = states.remove_request

    def remove_request(req_id: str) -> int | None:
        slot: int | None = inherited(req_id)
        if slot is not None:
            note(int(slot))
        return slot

    states.remove_request = remove_request


def watch_blocks(runner: Any, group: int, note: Callable[[int, Sequence[int], int | None], None]) -> None:
    """Call `note(slot, blocks, tokens that the prefix cache had)` for blocks of a group; None: the request goes on."""
    tables, computed = runner.block_tables, runner.req_states.num_computed_tokens_np
    inherited = tables.append_block_ids

    def append_block_ids(req_index: int, new_block_ids: Any, overwrite: bool) -> None:
        inherited(req_index, new_block_ids, overwrite)
        note(int(req_index), new_block_ids[group], int(computed[req_index]) if overwrite else None)

    tables.append_block_ids = append_block_ids


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
