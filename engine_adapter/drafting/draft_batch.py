"""The requests that still draft, row by row, and vLLM's metadata cut to them.

Used by the ragged drafter between two of its passes. Nothing of vLLM's own step is written to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class DraftBatch:
    """The requests that still draft, row by row."""

    rows: list[int]  # row in the engine's batch
    tokens: Tensor  # (rows,) newest draft token
    positions: Tensor  # (rows,)
    hidden: Tensor  # (rows, hidden size)
    metadata: Any
    sampling: Any

    def keep(self, places: list[int]) -> None:
        """Drop every row that is not named in `places`."""
        index = index_of(places, self.tokens)
        self.rows = [self.rows[place] for place in places]
        self.tokens, self.positions, self.hidden = self.tokens[index], self.positions[index], self.hidden[index]
        self.sampling = narrow_sampling(self.sampling, places)
        narrow_metadata(self.metadata, index)


def draft_metadata(metadata: Any, rejected: Tensor | None) -> Any:
    """Return one-token-per-request metadata with tensors of its own, behind the rejected tokens."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    bound = metadata.seq_lens_cpu_upper_bound
    return CommonAttentionMetadata(
        query_start_loc=metadata.query_start_loc,
        query_start_loc_cpu=metadata.query_start_loc_cpu,
        seq_lens=metadata.seq_lens.clone() if rejected is None else metadata.seq_lens - rejected,
        num_reqs=metadata.num_reqs,
        num_actual_tokens=metadata.num_reqs,
        max_query_len=1,
        max_seq_len=metadata.max_seq_len,
        block_table_tensor=metadata.block_table_tensor,
        slot_mapping=metadata.slot_mapping,
        seq_lens_cpu_upper_bound=None if bound is None else bound.clone(),
    )


def narrow_metadata(metadata: Any, index: Tensor) -> None:
    """Keep the requests of `index`; the rest of the shape follows in `shape_metadata`."""
    metadata.seq_lens = metadata.seq_lens[index]
    metadata.block_table_tensor = metadata.block_table_tensor[index]
    if metadata.seq_lens_cpu_upper_bound is not None:
        metadata.seq_lens_cpu_upper_bound = metadata.seq_lens_cpu_upper_bound[index.cpu()]


def shape_metadata(metadata: Any, size: int, drafter: Any) -> None:
    """Set the fields that follow from `size` requests with one token each."""
    import torch

    metadata.num_reqs = metadata.num_actual_tokens = size
    metadata.query_start_loc = drafter.arange[: size + 1]
    metadata.query_start_loc_cpu = torch.arange(size + 1, dtype=torch.int32)


def narrow_sampling(sampling: Any, rows: list[int]) -> Any:
    """Keep the temperatures of `rows`, all that vLLM reads when it draws draft tokens (0.32)."""
    if sampling.temperature is None or len(rows) == len(sampling.temperature):
        return sampling
    return replace(sampling, temperature=sampling.temperature[index_of(rows, sampling.temperature)])


def index_of(rows: list[int], like: Tensor) -> Tensor:
    """Return the rows as an index (rows,) int64 where `like` is, without waiting for the device."""
    import torch

    on_host = torch.tensor(rows, dtype=torch.int64, pin_memory=like.device.type == "cuda")
    return on_host.to(like.device, non_blocking=True)
