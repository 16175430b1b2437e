"""HELLO's graph lengths are those that vLLM's real graph manager dispatches to a full graph, and cost no device."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from io import StringIO
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter import graph_lengths as asked
from faser.engine_adapter.graph_lengths import graph_lengths

from .graph_managers import configured, vllm_module

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs an installed vLLM")

K_MAX, REQUESTS = 4, 8
ALL = list(range(K_MAX + 1))
TABLE = [(1, 4, 3), (5, 8, 1)]
EVERY_LENGTH = [(1, 1, 4), (2, 2, 3), (3, 4, 2), (5, 6, 1), (7, 8, 0)]
MODES = ["FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE"]
CASES = list(product(MODES, [None, TABLE, EVERY_LENGTH], [False, True]))
DENSE = [[(1, 4, 3), (5, 16, 1), (17, 32, 0)], [(1, 1, 5), (8, 9, 2)], [(1, 64, 9)], [(1, 2, 4), (40, 50, 1)]]

Lengths = Callable[[Any], list[int]]


def manager_module() -> ModuleType:
    return vllm_module("v1.worker.gpu.cudagraph_utils")


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, list[int]], bool]:
    """Tell whether a batch of such lengths replays a full graph, by a manager that vLLM made whole."""
    module = manager_module()

    def made(config: Any) -> Any:
        with monkeypatch.context() as worker:
            ranks = SimpleNamespace(is_first_rank=True, is_last_rank=True)
            worker.setattr(module, "get_pp_group", lambda: ranks)
            worker.setattr(module, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
            manager = module.CudaGraphManager(
                config, "cpu", config.compilation_config.cudagraph_mode, config.num_speculative_tokens + 1,
                varlen_decode=config.speculative_config.enable_adaptive_verification,
            )  # fmt: skip
        manager._graphs_captured = True
        return manager

    def is_full(config: Any, lengths: list[int]) -> bool:
        rows = [length + 1 for length in lengths]
        uniform = rows[0] if len(set(rows)) == 1 else None
        chosen = made(config).dispatch(len(rows), sum(rows), uniform, 0, max_query_len=max(rows))
        return bool(chosen.cg_mode.name == "FULL")

    return is_full


def wrongly_said(say: Lengths, config: Any, is_full: Callable[[Any, list[int]], bool]) -> list[int]:
    """Return the lengths of which something else is said than the manager does with batches of 1 to 8 requests."""
    said = say(config)
    batches = range(1, REQUESTS + 1)
    return [
        length
        for length in ALL
        if (length in said) != any(is_full(config, [length] * requests) for requests in batches)
    ]


def without_the_mode(config: Any) -> list[int]:
    """What FASER said once: lengths by the table, whatever graphs are captured."""
    drafting = config.speculative_config
    if drafting.enable_adaptive_verification:
        return ALL
    return sorted({row[2] for row in drafting.num_speculative_tokens_per_batch_size or [(1, 1, K_MAX)]})


@pytest.mark.parametrize(("mode", "table", "is_adaptive"), CASES)
def test_hello_says_what_vllms_dispatcher_does(
    mode: str, table: Any, is_adaptive: bool, dispatched: Callable[[Any, list[int]], bool]
) -> None:
    config = configured(mode, table, is_adaptive)
    assert wrongly_said(graph_lengths, config, dispatched) == []


@pytest.mark.parametrize("table", [None, TABLE])
def test_a_rule_that_ignores_the_mode_is_noticed(table: Any, dispatched: Callable[[Any, list[int]], bool]) -> None:
    captured = without_the_mode(configured("FULL", table))
    wrong = {mode: wrongly_said(without_the_mode, configured(mode, table), dispatched) for mode in MODES}
    others = [length for length in ALL if length not in captured]
    assert wrong == {"FULL": others, "FULL_AND_PIECEWISE": [], "FULL_DECODE_ONLY": [], "PIECEWISE": captured}


@pytest.mark.parametrize(
    ("mode", "table", "is_adaptive", "lengths"),
    [
        ("FULL", None, False, ALL),
        ("FULL", TABLE, False, ALL),
        ("PIECEWISE", None, False, []),
        ("PIECEWISE", TABLE, False, []),
        ("FULL_AND_PIECEWISE", None, False, [4]),
        ("FULL_AND_PIECEWISE", TABLE, False, [1, 3]),
        ("FULL_DECODE_ONLY", None, False, [4]),
        ("FULL_DECODE_ONLY", EVERY_LENGTH, False, ALL),
        ("FULL_AND_PIECEWISE", TABLE, True, ALL),
    ],
)
def test_what_is_said_by_graph_mode(mode: str, table: Any, is_adaptive: bool, lengths: list[int]) -> None:
    assert graph_lengths(configured(mode, table, is_adaptive)) == lengths


@pytest.mark.parametrize(
    ("mode", "table", "is_adaptive", "is_mixed_full"),
    [
        ("FULL", None, False, True),
        ("FULL_AND_PIECEWISE", None, True, True),
        ("FULL_AND_PIECEWISE", EVERY_LENGTH, False, False),
        ("FULL_DECODE_ONLY", EVERY_LENGTH, False, False),
    ],
)
def test_the_same_lengths_leave_open_what_mixed_batches_do(
    mode: str, table: Any, is_adaptive: bool, is_mixed_full: bool, dispatched: Callable[[Any, list[int]], bool]
) -> None:
    config = configured(mode, table, is_adaptive)
    assert graph_lengths(config) == ALL
    assert dispatched(config, [0, 1, 2, 4]) is is_mixed_full


@pytest.mark.parametrize(
    ("backend", "is_varlen", "lengths"),
    [("TRITON_ATTN", True, ALL), ("TRITON_ATTN", False, [4]), ("FLASH_ATTN", True, [4]), (None, True, [4])],
)
def test_where_the_runner_is_elsewhere_only_a_named_backend_says_that_lengths_may_mix(
    backend: str | None, is_varlen: bool, lengths: list[int], dispatched: Callable[[Any, list[int]], bool]
) -> None:
    """FlashAttention is version 3 only on a Hopper GPU."""
    named = None if backend is None else vllm_module("v1.attention.backends.registry").AttentionBackendEnum[backend]
    config = configured("FULL_AND_PIECEWISE", backend=named)
    assert graph_lengths(config, is_varlen) == lengths
    config.attention_config.backend_per_kind = {"sliding_window": named}
    assert graph_lengths(config, is_varlen) == [4]


@pytest.mark.parametrize("table", DENSE)
@pytest.mark.parametrize("requests", [1, 4, 7, 16, 64])
def test_a_tables_lengths_are_those_vllm_captures(table: list[tuple[int, int, int]], requests: int) -> None:
    manager_module()
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    dense = build_dynamic_sd_schedule_lookup(table, requests, 5)
    sizes = [1, 2, 4, *range(8, 6 * 64 + 1, 8)]
    config = configured("FULL_AND_PIECEWISE", table, k_max=5, requests=requests, sizes=sizes)
    assert graph_lengths(config) == sorted(set(dense[1:]))


def test_a_length_whose_rows_no_captured_size_holds_has_no_graph() -> None:
    assert graph_lengths(configured("FULL_AND_PIECEWISE", sizes=[1, 2, 4])) == []
    assert graph_lengths(configured("FULL", sizes=[1, 2])) == [0, 1]


def test_only_lengths_that_can_be_asked_for_are_said() -> None:
    longest = configured("FULL", k_max=63, sizes=[1, 2, 4, 64])
    assert graph_lengths(longest) == list(range(64))
    longest.num_speculative_tokens = 70
    longest.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 128]
    assert graph_lengths(longest) == []  # 0..64 all have one, one more than HELLO holds: they cost alike


def test_asking_reaches_for_no_process_group_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object) -> None:
        raise AssertionError("only a worker may do this")

    module = manager_module()
    monkeypatch.setattr(module, "get_pp_group", reached)
    monkeypatch.setattr(module, "current_platform", None)
    monkeypatch.setattr(module.torch.cuda, "_lazy_init", reached)
    assert graph_lengths(configured("FULL_AND_PIECEWISE")) == [4]


@pytest.mark.parametrize("what", ["module", "manager", "method", "attribute"])
def test_a_vllm_that_cannot_be_asked_is_one_line_and_no_lengths(
    what: str, monkeypatch: pytest.MonkeyPatch, vllm_log: StringIO
) -> None:
    module, config = manager_module(), configured("FULL")
    if what == "module":
        monkeypatch.setitem(sys.modules, module.__name__, None)
    elif what == "manager":
        monkeypatch.delattr(module, "CudaGraphManager")
    elif what == "method":
        monkeypatch.delattr(module.CudaGraphManager, "_init_candidates")
    else:
        del config.cache_config
    assert graph_lengths(config) == []
    assert vllm_log.getvalue().count("\n") == 1
    assert "FASER cannot ask this vLLM which draft lengths have full CUDA graphs" in vllm_log.getvalue()


def test_engines_without_graphs_or_on_v1_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[Any] = []
    monkeypatch.setattr(asked, "Dispatcher", asked_for.append)
    v1, undrafted, eager, sizeless = (configured("FULL") for _ in range(4))
    v1.use_v2_model_runner = False
    undrafted.speculative_config = None
    eager.compilation_config.cudagraph_mode = configured("NONE").compilation_config.cudagraph_mode
    sizeless.compilation_config.cudagraph_capture_sizes = []
    assert [graph_lengths(config) for config in (v1, undrafted, eager, sizeless)] == [[], [], [], []]
    assert asked_for == []
