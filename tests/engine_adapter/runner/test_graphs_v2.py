"""On vLLM's real graph managers: mixed lengths replay full graphs, every draft length has one, doubt leaves vLLM's."""

import random
import socket
import subprocess
import sys
from importlib.util import find_spec
from io import StringIO
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter.graph_lengths import graph_lengths
from faser.engine_adapter.mixed_graphs import noted_outcome
from faser.engine_adapter.runner.v2_graphs import GraphsV2, captured_lengths

from ..graph_managers import FIRST_PASS, SIZES, Runner, configured, vllm_module, without_device

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs an installed vLLM")

ALL = [0, 1, 2, 3, 4]
TABLE = [(1, 4, 3), (5, 8, 1)]
APART = ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"]
MODES = ["FULL", *APART, "PIECEWISE"]
MIXED = [[0, 1, 2, 4], [4, 4, 4, 0], [3, 2], [0, 0, 0, 0, 0, 0, 1]]
SEARCH = SimpleNamespace(init_cudagraph_manager=lambda mode: None)  # a drafter without graphs, as ngram_gpu is


@pytest.fixture(autouse=True)
def without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    without_device(monkeypatch)
    group = SimpleNamespace(world_size=1)
    monkeypatch.setattr(vllm_module("distributed.parallel_state"), "get_tp_group", lambda: group)


def extended(runner: Runner, is_varlen: bool = True, draft_graphs: int = 8) -> Runner:
    GraphsV2(runner, is_varlen, draft_graphs).extend()
    return runner.captured()


def full_lengths(runner: Runner) -> list[int]:
    """Return the lengths of which four requests replay a full graph."""
    return [length for length in ALL if runner.verify([length] * 4).cg_mode.name == "FULL"]


def mixed_modes(runner: Runner) -> set[str]:
    return {runner.verify(lengths).cg_mode.name for lengths in MIXED}


@pytest.mark.parametrize(("mode", "table"), list(product(MODES, [None, TABLE])))
def test_every_length_and_every_mix_replays_a_full_graph_unless_the_mode_has_none(mode: str, table: Any) -> None:
    runner = extended(Runner(configured(mode, table)))
    assert full_lengths(runner) == ([] if mode == "PIECEWISE" else ALL)
    assert mixed_modes(runner) == ({"PIECEWISE"} if mode == "PIECEWISE" else {"FULL"})


@pytest.mark.parametrize(("mode", "table"), list(product(MODES, [None, TABLE])))
def test_vllms_own_graphs_serve_one_length_of_all_requests_alone(mode: str, table: Any) -> None:
    own = Runner(configured(mode, table)).captured()
    uniform = [1, 3] if table else [4]
    assert full_lengths(own) == {"FULL": ALL, "PIECEWISE": []}.get(mode, uniform)
    left = {"FULL_AND_PIECEWISE": "PIECEWISE", "FULL_DECODE_ONLY": "NONE"}.get(mode, mode)
    assert mixed_modes(own) == {left}


@pytest.mark.parametrize(("mode", "left"), [("FULL_AND_PIECEWISE", "PIECEWISE"), ("FULL_DECODE_ONLY", "NONE")])
def test_a_batch_with_a_prompt_stays_out_of_graphs_for_decodes(mode: str, left: str) -> None:
    runner = extended(Runner(configured(mode)))
    assert runner.verify([0, 1, 2, 4], has_prompt=True).cg_mode.name == left
    assert runner.verify([2, 2, 2], has_prompt=True).cg_mode.name == left  # its rows alone would fit


def test_a_prompt_whose_last_token_runs_as_a_decode_keeps_the_full_graph_that_vllm_gives_it() -> None:
    """vLLM then tells how many tokens each request has, but not the longest: 0.32 model_runner.py:1757."""
    config = configured("FULL_AND_PIECEWISE")
    for runner in (Runner(config).captured(), extended(Runner(config))):
        assert runner.ask(runner.cudagraph_manager, 4, 20, 5, None).cg_mode.name == "FULL"


@pytest.mark.parametrize("mode", APART)
def test_no_batch_loses_the_full_graph_it_has_by_vllms_own(mode: str) -> None:
    chance = random.Random(3)
    for _ in range(200):
        k_max, requests = chance.randint(1, 6), chance.choice([1, 3, 8, 20])
        table = chance.choice([None, [(1, 2, k_max), (3, requests + 2, chance.randint(0, k_max))]])
        largest = requests * (k_max + 1)  # vLLM's own sizes hold it
        sizes = sorted({size for size in (1, 2, 4, *range(8, 256, 8)) if size < largest} | {largest})
        given: dict[str, Any] = {"k_max": k_max, "requests": requests, "sizes": sizes}
        own, ours = (Runner(configured(mode, table, **given)) for _ in range(2))
        own, ours = own.captured(), extended(ours)
        for count, length in product(range(1, requests + 1), range(k_max + 1)):
            lengths = [length] * count
            assert (ours.verify(lengths).cg_mode.name == "FULL") >= (own.verify(lengths).cg_mode.name == "FULL")
        lengths = [chance.randint(0, k_max) for _ in range(chance.randint(1, requests))]
        assert ours.verify(lengths).cg_mode.name == "FULL"


@pytest.mark.parametrize("mode", APART)
def test_the_drafters_first_pass_replays_a_graph_of_the_shape_whose_metadata_it_reads(mode: str) -> None:
    runner = extended(Runner(configured(mode)))
    for lengths in [*MIXED, *([length] * 7 for length in ALL)]:
        verified = runner.verify(lengths)
        first = runner.first_pass(verified, lengths)
        assert first.cg_mode.name == "FULL"
        assert (first.num_tokens, first.num_reqs) == (verified.num_tokens, verified.num_reqs)


def test_a_first_pass_of_vllms_own_behind_such_a_verification_would_be_of_another_shape() -> None:
    runner = Runner(configured("FULL_AND_PIECEWISE"))
    own = getattr(runner.speculator, FIRST_PASS)
    GraphsV2(runner, True, 8).extend()
    setattr(runner.speculator, FIRST_PASS, own)
    runner.captured()
    verified = runner.verify([4, 4])
    first = runner.first_pass(verified, [4, 4])
    assert first.cg_mode.name == "FULL"
    assert first.num_reqs != verified.num_reqs


def test_the_first_pass_replays_no_full_graph_behind_a_step_without_one() -> None:
    runner = extended(Runner(configured("FULL_AND_PIECEWISE")))
    runner.first_pass(runner.verify([4, 4]), [4, 4])
    prompt = runner.verify([2, 1], has_prompt=True)
    assert runner.first_pass(prompt, [2, 1], has_prompt=True).cg_mode.name == "PIECEWISE"
    runner.first_pass(runner.verify([2, 1]), [2, 1])
    eager = SimpleNamespace(num_tokens=8)  # the target asked no manager: vLLM runs such a step eagerly
    assert runner.first_pass(eager, [2, 1]).cg_mode.name == "PIECEWISE"


@pytest.mark.parametrize(("table", "own"), [(None, {4: 3, 3: 3, 2: 3}), (TABLE, {4: None, 3: 2, 2: None})])
def test_every_draft_length_has_a_graph_of_its_own(table: Any, own: dict[int, int | None]) -> None:
    """By vLLM's own, the graph of another length runs too many rounds, and a length outside the table has none."""
    config = configured("FULL_AND_PIECEWISE", table)
    vllms, ours = Runner(config).captured(), extended(Runner(config))
    assert {length: rounds_run(vllms, length) for length in own} == own
    for length, rounds in own.items():
        assert (vllms.rounds(3, length).cg_mode.name == "FULL") == (rounds is not None)
    for requests, length in product(range(1, 9), (2, 3, 4)):
        assert ours.rounds(requests, length).cg_mode.name == "FULL"
        assert rounds_run(ours, length, requests) == length - 1


def rounds_run(runner: Runner, length: int, requests: int = 3) -> int | None:
    """Return how many rounds behind the first the graph of a length runs; None where it has none."""
    graphs = runner.speculator.decode_cudagraph_manager.graphs
    rounds: int | None = graphs.get(runner.rounds(requests, length))
    return rounds


def test_a_table_of_every_length_lets_vllm_capture_the_same() -> None:
    every = [(1, 1, 4), (2, 2, 3), (3, 8, 2)]
    own, ours = Runner(configured("FULL", every)).captured(), extended(Runner(configured("FULL")))
    mine, theirs = (each.speculator.decode_cudagraph_manager for each in (ours, own))
    assert mine._capture_descs == theirs._capture_descs
    assert set(mine.graphs) == set(theirs.graphs)


def test_fewer_batch_sizes_than_lengths_are_no_limit() -> None:
    config = configured("FULL_AND_PIECEWISE", requests=1, sizes=[1, 2, 4, 5])
    assert [rounds_run(extended(Runner(config)), length, 1) for length in (2, 3, 4)] == [1, 2, 3]


def test_of_many_lengths_some_are_captured_and_the_others_replay_the_next_one() -> None:
    config = configured("FULL_AND_PIECEWISE", [(1, 8, 7)], k_max=12, sizes=[*SIZES, 104])
    runner = extended(Runner(config), draft_graphs=3)
    assert runner.speculator.decode_cudagraph_manager.lengths == (5, 7, 9, 12)
    assert [rounds_run(runner, length) for length in range(2, 13)] == [4, 4, 4, 4, 6, 6, 8, 8, 11, 11, 11]


@pytest.mark.parametrize(
    ("longest", "most", "table", "lengths"),
    [
        (1, 8, [], []),
        (4, 0, [3], []),
        (4, 8, [], [2, 3, 4]),
        (9, 8, [], [2, 3, 4, 5, 6, 7, 8, 9]),
        (9, 1, [], [9]),
        (16, 4, [], [5, 9, 13, 16]),
        (16, 2, [1, 0, 5, 40], [5, 9, 16]),
    ],
)
def test_captured_lengths_hold_the_longest_and_the_tables(
    longest: int, most: int, table: list[int], lengths: list[int]
) -> None:
    assert captured_lengths(longest, most, table) == lengths


@pytest.mark.parametrize(("draft_graphs", "is_fused"), [(0, True), (8, False)])
def test_draft_graphs_stay_vllms_where_they_are_not_wanted_or_not_fused(draft_graphs: int, is_fused: bool) -> None:
    runner = Runner(configured("FULL"), is_fused=is_fused)
    own = runner.speculator.decode_cudagraph_manager
    descs = dict(own._capture_descs)
    GraphsV2(runner, True, draft_graphs).extend()
    assert runner.speculator.decode_cudagraph_manager is own
    assert own._capture_descs == descs


@pytest.mark.parametrize("support", ["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"])
def test_a_backend_that_replays_one_length_keeps_vllms_managers_and_is_named(support: str, vllm_log: StringIO) -> None:
    assert refused(Runner(configured("FULL_AND_PIECEWISE"), support=support)) == 1
    assert "SomeBackend replay one length; expected FlashAttention 3" in vllm_log.getvalue()


@pytest.mark.parametrize(("bound", "is_refused"), [(4, True), (5, False)])
def test_a_backends_bound_is_heeded(bound: int, is_refused: bool) -> None:
    runner = Runner(configured("FULL_AND_PIECEWISE"), support="UNIFORM_BATCH", bound=bound)
    assert refused(runner) == is_refused


def refused(runner: Runner, is_varlen: bool = True) -> bool:
    """Tell whether verification and first pass have the managers that vLLM made; both or neither."""
    kept = runner.cudagraph_manager, getattr(runner.speculator, FIRST_PASS)
    GraphsV2(runner, is_varlen, 8).extend()
    now = runner.cudagraph_manager, getattr(runner.speculator, FIRST_PASS)
    is_kept = {before is after for before, after in zip(kept, now, strict=True)}
    assert len(is_kept) == 1
    return is_kept.pop()


def test_attention_outside_the_groups_is_asked_too(vllm_log: StringIO) -> None:
    assert refused(Runner(configured("FULL_AND_PIECEWISE"), additional="UNIFORM_BATCH"))
    assert "CrossAttention" in vllm_log.getvalue()


UNTRIED: list[tuple[str, dict[str, Any]]] = [
    ("parallel_config", {"pipeline_parallel_size": 2}),
    ("parallel_config", {"data_parallel_size": 2}),
    ("parallel_config", {"decode_context_parallel_size": 2}),
    ("parallel_config", {"prefill_context_parallel_size": 2}),
    ("parallel_config", {"use_ubatching": True}),
    ("model_config", {"is_encoder_decoder": True}),
    ("cache_config", {"kv_sharing_fast_prefill": True}),
    ("", {"lora_config": object()}),
]


@pytest.mark.parametrize(("part", "change"), UNTRIED)
def test_what_vllm_never_runs_with_such_graphs_keeps_its_managers_in_one_line(
    part: str, change: dict[str, Any], vllm_log: StringIO
) -> None:
    config = configured("FULL_AND_PIECEWISE")
    vars(getattr(config, part) if part else config).update(change)
    runner = Runner(config)
    assert refused(runner)
    assert vllm_log.getvalue().count("replay no full CUDA graph") == 1
    runner.captured()
    assert [rounds_run(runner, length) for length in (2, 3, 4)] == [1, 2, 3]  # the rest goes on
    assert graph_lengths(config) == [4]


def test_the_switch_keeps_vllms_managers(vllm_log: StringIO) -> None:
    assert refused(Runner(configured("FULL_AND_PIECEWISE")), is_varlen=False)
    assert "FASER_VARLEN_GRAPHS=0; expected 1" in vllm_log.getvalue()


def test_adaptive_verification_has_such_graphs_and_gets_a_first_pass_of_their_shape(vllm_log: StringIO) -> None:
    config = configured("FULL_AND_PIECEWISE", is_adaptive=True)
    own, ours = Runner(config).captured(), extended(Runner(config))
    assert own.first_pass(own.verify([4, 4]), [4, 4]).num_reqs != own.verify([4, 4]).num_reqs
    assert ours.first_pass(ours.verify([4, 4]), [4, 4]).num_reqs == ours.verify([4, 4]).num_reqs
    assert graph_lengths(config) == ALL
    off = configured("FULL_AND_PIECEWISE", is_adaptive=True)
    assert refused(Runner(off), is_varlen=False)
    assert graph_lengths(off, is_varlen=False) == ALL
    assert "replay no full CUDA graph" not in vllm_log.getvalue()


@pytest.mark.parametrize("what", ["support", "target", "first pass", "query length"])
def test_a_failure_keeps_vllms_managers_in_one_line(
    what: str, monkeypatch: pytest.MonkeyPatch, vllm_log: StringIO
) -> None:
    runner = Runner(configured("FULL_AND_PIECEWISE"))
    broken = {"support": "attn_groups", "target": "cudagraph_manager"}
    if what in broken:
        holder = runner if what == "support" else runner.cudagraph_manager
        monkeypatch.delattr(holder, "attn_groups" if what == "support" else "lora_capture_cases")
    elif what == "first pass":
        monkeypatch.delattr(getattr(runner.speculator, FIRST_PASS), "device")
    else:
        monkeypatch.setattr(getattr(runner.speculator, FIRST_PASS), "decode_query_len", 9)
    assert refused(runner)
    assert vllm_log.getvalue().count("FASER leaves vLLM's own CUDA graphs for mixed draft lengths") == 1
    assert noted_outcome(runner.vllm_config) is False
    assert full_lengths(runner.captured()) == [4]


def test_a_failure_of_draft_graphs_keeps_vllms(monkeypatch: pytest.MonkeyPatch, vllm_log: StringIO) -> None:
    module = vllm_module("v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils")
    runner = Runner(configured("FULL_AND_PIECEWISE"))
    own = dict(runner.speculator.decode_cudagraph_manager._capture_descs)
    with monkeypatch.context() as broken:
        broken.delattr(module, "SpeculatorBatchDescriptor")
        GraphsV2(runner, True, 8).extend()
    assert "FASER leaves vLLM's own CUDA graphs for each draft length" in vllm_log.getvalue()
    assert runner.speculator.decode_cudagraph_manager._capture_descs == own
    assert rounds_run(runner.captured(), 2) == 3


def test_a_drafter_without_graphs_and_a_runner_without_a_drafter_are_served_too() -> None:
    assert mixed_modes(extended(Runner(configured("FULL_AND_PIECEWISE"), speculator=SEARCH))) == {"FULL"}
    runner = Runner(configured("FULL_AND_PIECEWISE"))
    own, runner.speculator = runner.cudagraph_manager, None
    GraphsV2(runner, True, 8).extend()
    assert runner.cudagraph_manager is own


def test_managers_made_anew_are_extended_anew_and_lines_are_said_once(vllm_log: StringIO) -> None:
    """vLLM makes them twice: to measure their memory, and to keep."""
    first = Runner(configured("FULL_AND_PIECEWISE"))
    graphs = GraphsV2(first, True, 8)
    graphs.extend()
    first.captured()
    again = Runner(first.vllm_config)
    first.cudagraph_manager, first.speculator = again.cudagraph_manager, again.speculator
    graphs.extend()
    assert mixed_modes(first.captured()) == {"FULL"}
    assert rounds_run(first, 2) == 1
    assert vllm_log.getvalue().count("replay any mix of draft lengths") == 1
    assert vllm_log.getvalue().count("tokens each, at every batch size") == 1


@pytest.mark.parametrize("mode", APART)
def test_hello_says_what_the_runner_in_its_process_noted(mode: str) -> None:
    with_graphs, without = configured(mode), configured(mode)
    GraphsV2(Runner(with_graphs), True, 8).extend()
    GraphsV2(Runner(without, support="UNIFORM_BATCH"), True, 8).extend()
    assert [graph_lengths(config) for config in (with_graphs, without)] == [ALL, [4]]


RANK = """
import sys, types, torch.distributed as dist
rank, port, value = (int(text) for text in sys.argv[1:])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
state = types.ModuleType("vllm.distributed.parallel_state")
state.get_tp_group = lambda: types.SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
sys.modules |= {name: state for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state")}
from faser.engine_adapter.patches.v2_graphs import least
print(least(value))
"""


def test_ranks_agree_on_the_least_that_one_of_them_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(port), str(value)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, value in enumerate((8, 3))
    ]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["3", "3"]


def test_a_rank_that_declines_keeps_all_ranks_on_vllms_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from faser.engine_adapter.runner import v2_graphs

    monkeypatch.setattr(v2_graphs, "least", lambda value: min(value, 0))
    runner = Runner(configured("FULL_AND_PIECEWISE"))
    own = runner.speculator.decode_cudagraph_manager
    assert refused(runner)
    assert runner.speculator.decode_cudagraph_manager is own
    assert noted_outcome(runner.vllm_config) is False
