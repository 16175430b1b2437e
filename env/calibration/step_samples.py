"""Measured steps as arrays: what each did and how long its phases took, ready for a fit.

Built by controller/calibrate/measured.py from telemetry, by tests from known coefficients; used by
env/calibration/step_fit.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.compiled import kept
from ..profile.step_basis import (
    DRAFT_BASIS,
    HOST_BASIS,
    VERIFY_BASIS,
    Phase,
    fill_cut_basis,
    fill_draft_basis,
    fill_host_basis,
    padded_rows,
)


@dataclass(frozen=True, slots=True)
class StepSamples:
    """n steps; every array is (n,) float64. Names and units as in engine_profile.Work; times in s, NaN: not known."""

    requests: Floats
    decode_rows: Floats
    draft_tokens: Floats
    prompts: Floats
    prompt_tokens: Floats
    sampled_rows: Floats
    kv_tokens: Floats
    attended_tokens: Floats
    attended_prompt_tokens: Floats
    drafting_requests: Floats
    rounds: Floats
    draft_rows: Floats
    first_rows: Floats
    kept_rows: Floats
    draft_attended_tokens: Floats
    arrivals: Floats
    verify_s: Floats  # everything of the step but drafting and deciding what is pruned
    draft_s: Floats
    host_s: Floats  # since the end of the step before; NaN after an idle time
    pruned_rows: Floats  # draft rows that left the forward pass early
    saved_rows: Floats  # the same, each as the share of the layers that it was spared
    overlap_s: Floats  # of draft_s: beside something else, so that nobody waited for it

    def __len__(self) -> int:
        return len(self.requests)

    @classmethod
    def joined(cls, parts: list[StepSamples]) -> StepSamples:
        """Return all parts as one."""
        return cls(*(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(cls)))

    def where(self, chosen: Bools | Ints) -> StepSamples:
        """Return some of the steps."""
        return StepSamples(*(getattr(self, item.name)[chosen] for item in fields(self)))

    def shortened(self, verify_s: Floats, draft_s: Floats) -> StepSamples:
        """Return the steps with so much less time in each of both phases, (n,) each."""
        return replace(self, verify_s=self.verify_s - verify_s, draft_s=self.draft_s - draft_s)

    def on_a_machine(self, slower: Floats) -> StepSamples:
        """Return the steps as they would have been on a machine that was not slower by these factors, (n,)."""
        return replace(
            self, verify_s=self.verify_s / slower, draft_s=self.draft_s / slower, host_s=self.host_s / slower,
            overlap_s=self.overlap_s / slower,
        )  # fmt: skip

    def times(self, phase: Phase) -> Floats:
        """Return one phase's times."""
        times: Floats = getattr(self, f"{phase}_s")
        return times

    def basis(self, phase: Phase, graph_sizes: tuple[int, ...] = ()) -> Floats:
        """Return (n, terms of the phase)."""
        if phase == "verify":
            out = np.zeros((len(self), len(VERIFY_BASIS)))
            _fill_verify(
                out, self.pruned_rows, self.saved_rows, self.requests, self.decode_rows, self.draft_tokens,
                self.prompts, self.prompt_tokens, self.sampled_rows, self.kv_tokens, self.attended_tokens,
                self.attended_prompt_tokens,
                np.array(graph_sizes, np.float64),
            )  # fmt: skip
        elif phase == "draft":
            out = np.zeros((len(self), len(DRAFT_BASIS)))
            _fill_draft(
                out, self.drafting_requests, self.rounds, self.draft_rows, self.first_rows, self.kept_rows,
                self.draft_attended_tokens,
            )  # fmt: skip
        else:
            out = np.zeros((len(self), len(HOST_BASIS)))
            _fill_host(out, self.requests, self.arrivals)
        return out


@kept
def _fill_verify(
    out: Floats,
    pruned_rows: Floats,
    saved_rows: Floats,
    requests: Floats,
    decode_rows: Floats,
    draft_tokens: Floats,
    prompts: Floats,
    prompt_tokens: Floats,
    sampled_rows: Floats,
    kv_tokens: Floats,
    attended: Floats,
    attended_prompt: Floats,
    graph_sizes: Floats,
) -> None:
    scratch = np.zeros(out.shape[1])
    for i in range(len(out)):
        rows = decode_rows[i] + prompt_tokens[i]
        padding = padded_rows(rows, graph_sizes) - rows
        share = saved_rows[i] / pruned_rows[i] if pruned_rows[i] > 0.0 else 0.0
        fill_cut_basis(
            out[i], scratch, pruned_rows[i], share, requests[i], decode_rows[i] + padding, draft_tokens[i],
            prompts[i], prompt_tokens[i], sampled_rows[i], kv_tokens[i], attended[i], attended_prompt[i],
        )  # fmt: skip


@kept
def _fill_draft(
    out: Floats,
    requests: Floats,
    rounds: Floats,
    draft_rows: Floats,
    first_rows: Floats,
    kept_rows: Floats,
    attended: Floats,
) -> None:
    for i in range(len(out)):
        fill_draft_basis(out[i], requests[i], rounds[i], draft_rows[i], first_rows[i], kept_rows[i], attended[i])


@kept
def _fill_host(out: Floats, requests: Floats, arrivals: Floats) -> None:
    for i in range(len(out)):
        fill_host_basis(out[i], requests[i], arrivals[i])
