"""Which CUDA graphs FASER lets vLLM's V2 runner capture: for mixed lengths, and for each length that may be drafted.

Called by the V2 runner's mixin once the graph managers stand and before anything is captured, also when vLLM measures
how much memory the graphs take. On any failure vLLM's own managers stay, and one line says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..mixed_graphs import APART, SWITCH, Obstacle, backend_obstacle, config_obstacle, graph_mode, note_outcome
from ..operator_log import operator_log
from ..patches.v2_graphs import VarlenManagers, capture_lengths, has_fused_rounds, least, unsupported_backend

logger = operator_log(__name__)


class GraphsV2:
    """FASER's hold on the graph managers of one runner."""

    def __init__(self, runner: Any, is_varlen: bool, draft_graphs: int) -> None:
        """Take the runner and what FASER_VARLEN_GRAPHS and FASER_DRAFT_GRAPHS say."""
        self._runner, self._is_varlen, self._draft_graphs = runner, is_varlen, draft_graphs
        self._said: set[str] = set()

    def extend(self) -> None:
        """Let more be captured than vLLM would, where that is to be had."""
        if self._runner.speculator is None:
            return
        self._extend_verification()
        self._extend_drafting()

    def _extend_verification(self) -> None:
        config = self._runner.vllm_config
        obstacle = config_obstacle(config)
        if obstacle is not None or graph_mode(config) not in APART:
            self._tell(obstacle)
            return
        managers = self._managers()
        is_mixed = least(managers is not None) > 0
        if managers is not None and is_mixed:
            managers.install()
            self._say("full CUDA graphs replay any mix of draft lengths")
        note_outcome(config, is_mixed)

    def _managers(self) -> VarlenManagers | None:
        """Make what takes mixed lengths; None, and a line that says why, where it is not to be had."""
        if not self._is_varlen:
            if not self._runner.cudagraph_manager.varlen_decode:  # adaptive verification has them anyway
                self._tell(Obstacle(f"{SWITCH}=0", "1", f"unset {SWITCH}"))
            return None
        try:
            backend = unsupported_backend(self._runner)
            if backend is None:
                return VarlenManagers(self._runner)
            self._tell(backend_obstacle(backend))
        except Exception as error:
            self._warn("mixed draft lengths", error)
        return None

    def _extend_drafting(self) -> None:
        runner = self._runner
        if not has_fused_rounds(runner.speculator):
            return
        table = runner.speculative_config.num_speculative_tokens_per_batch_size or ()
        lengths = captured_lengths(
            runner.num_speculative_steps, least(self._draft_graphs), (length for _, _, length in table)
        )
        if not lengths:
            return
        try:
            capture_lengths(runner.speculator, lengths)
        except Exception as error:
            self._warn("each draft length", error)
            return
        self._say(f"one CUDA graph drafts {', '.join(map(str, lengths))} tokens each, at every batch size")

    def _tell(self, obstacle: Obstacle | None) -> None:
        if obstacle is not None:
            self._say(obstacle.line())

    def _say(self, line: str) -> None:
        """Log a line once: vLLM makes managers twice, the first time to measure them."""
        if line not in self._said:
            self._said.add(line)
            logger.info("FASER on vLLM's V2 runner: %s", line)

    def _warn(self, what: str, error: Exception) -> None:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        logger.warning("FASER leaves vLLM's own CUDA graphs for %s: %s", what, said)


def captured_lengths(longest: int, most: int, table: Iterable[int] = ()) -> list[int]:
    """Return the draft lengths whose rounds behind the first get a graph; none where vLLM shall choose them.

    :param longest: num_speculative_tokens
    :param most: so many of them, spread evenly; the longest is always one, and so are those of the operator's table
    """
    lengths = range(2, longest + 1)
    count = min(most, len(lengths))
    if count < 1:
        return []
    spread = {lengths[(place * len(lengths) - 1) // count] for place in range(1, count + 1)}
    return sorted(spread | {min(length, longest) for length in table if length > 1})
