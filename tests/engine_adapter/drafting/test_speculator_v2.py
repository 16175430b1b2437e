"""What interpreted kernels do not show of drafting on V2: nothing is read back, and a failure leaves all as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from faser.engine_adapter.drafting.late_confidences import LateConfidences
from faser.engine_adapter.drafting.ragged_v2 import RaggedV2, draft_ragged
from faser.engine_adapter.patches.speculators.rounds import DecodeRounds, around_decode
from faser.engine_adapter.patches.v2 import around_propose

from ..graph_managers import vllm_module

pytest.importorskip("vllm", reason="needs an installed vLLM")

REQUESTS, LONGEST = 4, 3


class NothingIsReadBack(TorchDispatchMode):
    """Fails where a device would be waited for, which no captured graph may do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket._qualified_op_name not in ("aten::_local_scalar_dense", "aten::nonzero")
        return func(*args, **(kwargs or {}))


def speculator(**changes: Any) -> Any:
    """Return as much of vLLM's speculator as is read."""
    buffers = SimpleNamespace(
        input_ids=torch.arange(8), positions=torch.arange(8) + 10, seq_lens=torch.arange(8) + 20,
        query_start_loc=torch.tensor([0, 1, 2, 3, 4, 4, 4, 4, 4]),
    )  # fmt: skip
    tables = SimpleNamespace(gathered=[], gather_block_tables=lambda slots, num_reqs_padded: None)
    plain = {
        "max_num_reqs": 8, "num_speculative_steps": LONGEST, "device": torch.device("cpu"), "input_buffers": buffers,
        "hidden_states": torch.randn(8, 2), "idx_mapping": torch.tensor([3, 1, 0, 2, -1, -1, -1, -1]),
        "sample_src_positions": torch.arange(8), "draft_tokens": torch.full((8, LONGEST), -1), "block_tables": tables,
        "draft_token_confidence_probs": torch.zeros(8, LONGEST), "acceptance_estimator": None,
        "use_local_argmax_reduction": False, "load_model": lambda: None,
    }  # fmt: skip
    return SimpleNamespace(**(plain | changes))


def runner_of(owner: Any) -> Any:
    """Return as much of vLLM's runner as is read; the first pass of its speculator ran."""
    owner.draft_tokens[:REQUESTS, 0] = owner.idx_mapping[:REQUESTS] * 10
    states = SimpleNamespace(num_computed_tokens=SimpleNamespace(gpu=torch.zeros(8)))
    return SimpleNamespace(speculator=owner, req_states=states)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `make(speculator)`: its rounds, each of which draws the slot of its row and the step."""

    def run(decode: Any, step: int, rows: list[int]) -> None:
        owner, left = decode._speculator, decode._left
        owner.draft_tokens[:left, step] = owner.idx_mapping[:left] * 10 + step
        owner.draft_token_confidence_probs[:left, step] = owner.idx_mapping[:left] / 10 + step
        decode._drafts[rows, step] = owner.draft_tokens[:left, step]
        decode._sure[rows, step] = owner.draft_token_confidence_probs[:left, step]

    monkeypatch.setattr(DecodeRounds, "run", run)
    monkeypatch.setattr("faser.engine_adapter.patches.speculators.rounds.masks_freed_blocks", lambda: False)
    monkeypatch.setattr(DecodeRounds, "_dispatched", lambda _, rows: SimpleNamespace(num_tokens=rows))

    def make(owner: Any) -> DecodeRounds:
        return DecodeRounds(runner_of(owner), REQUESTS, torch.arange(8), LONGEST)

    return make


def test_confidences_are_noted_without_reading_the_step_back() -> None:
    owner = speculator()
    noted = LateConfidences(owner, is_pinned=False)
    assert not noted.is_on  # a drafter that shows no logits has no confidences
    owner.load_model()
    watched = owner.acceptance_estimator
    owner.load_model()  # weights may be loaded again
    assert owner.acceptance_estimator is watched
    logits = torch.tensor([[0.0, 2.0], [5.0, 0.0], [float("nan"), 0.0]])
    with NothingIsReadBack():
        owner.acceptance_estimator.predict(logits, torch.tensor([7, 0, -1]), torch.tensor(1), None, None)
    assert noted.is_on
    drawn = noted.take(torch.tensor([7, 0, -1]), ["a", "b", "c"], [2, 2, 2])
    assert drawn.told() == {"a": (0.0, pytest.approx(0.8808, abs=1e-3)), "b": (0.0, pytest.approx(0.9933, abs=1e-3)),
                            "c": (0.0, 0.0)}  # fmt: skip


def test_logits_of_an_unknown_kind_end_confidences_and_nothing_else(vllm_log: Any) -> None:
    owner = speculator()
    noted = LateConfidences(owner, is_pinned=False)
    owner.load_model()
    for _ in range(2):
        owner.acceptance_estimator.predict(None, torch.tensor([0]), torch.tensor(0), None, None)
    assert not noted.is_on
    assert vllm_log.getvalue().count("looking at its logits failed") == 1


def test_each_row_gets_its_own_tokens_and_confidences_back(rounds: Any) -> None:
    owner = speculator()
    assert draft_ragged(rounds(owner), [1, 3, 0, 2]) == (4, 2, 1)
    assert owner.draft_tokens[:REQUESTS].tolist() == [[30, 30, 30], [10, 11, 12], [0, 0, 0], [20, 21, 20]]
    told = owner.draft_token_confidence_probs[:REQUESTS]
    assert told[1].tolist() == pytest.approx([0.0, 1.1, 2.1])
    assert told[3].tolist() == pytest.approx([0.0, 1.2, 0.0])


def test_rows_stay_where_fewer_would_be_no_smaller_a_graph(rounds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeRounds, "_dispatched", lambda _, rows: SimpleNamespace(num_tokens=-(-rows // 4) * 4))
    assert draft_ragged(rounds(speculator()), [1, 3, 0, 2]) == (4, 4, 4)


def test_rows_that_left_are_padding(rounds: Any) -> None:
    owner = speculator()
    decode = rounds(owner)
    decode.keep([1, 3])
    assert owner.idx_mapping.tolist() == [1, 2, -1, -1, -1, -1, -1, -1]
    assert owner.input_buffers.seq_lens.tolist() == [21, 23, 0, 0, 0, 0, 0, 0]
    assert owner.input_buffers.query_start_loc.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 2]


def test_after_a_failure_all_is_as_it_was_before_the_first_round(rounds: Any) -> None:
    owner = speculator()
    decode = rounds(owner)
    buffers = owner.input_buffers
    state = (*vars(buffers).values(), owner.hidden_states, owner.idx_mapping, owner.sample_src_positions)
    before = [tensor[: REQUESTS + 1].clone() for tensor in state]
    decode.keep([1, 3])
    decode.run(1, [1, 3])
    assert not all(torch.equal(now[: REQUESTS + 1], was) for now, was in zip(state, before, strict=True))
    decode.restore()
    for now, was in zip(state, before, strict=True):
        assert torch.equal(now[:REQUESTS], was[:REQUESTS])
    assert torch.equal(buffers.query_start_loc[: REQUESTS + 1], before[3])
    assert owner.draft_tokens[:REQUESTS, 0].tolist() == [30, 10, 0, 20]


@pytest.fixture
def ragged(rounds: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `make(speculator)`: FASER's drafting of it; `decode()` is what vLLM would ask."""
    monkeypatch.setattr("faser.engine_adapter.drafting.ragged_v2.around_decode", lambda *_: True)
    monkeypatch.setattr("faser.engine_adapter.drafting.ragged_v2.has_peers", lambda: False)

    def make(owner: Any) -> Any:
        made: Any = RaggedV2(runner_of(owner))
        made.decode = lambda: made._decode(REQUESTS, torch.arange(8), LONGEST)
        return made

    return make


def test_lengths_are_those_of_one_drafting_only(ragged: Any) -> None:
    drafting = ragged(speculator())
    drafting.begin([1, 3, 0, 2])
    assert drafting.decode()
    assert not drafting.decode()  # nobody said a length: vLLM drafts, as long as it likes


@pytest.fixture
def broken(ragged: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `make(speculator)`: drafting of which every round fails."""

    def run(decode: Any, step: int, rows: list[int]) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(DecodeRounds, "run", run)
    return ragged


def test_after_a_failure_vllm_drafts_from_where_it_began_and_from_then_on(broken: Any, vllm_log: Any) -> None:
    owner = speculator()
    drafting, slots = broken(owner), owner.idx_mapping[:REQUESTS].tolist()
    for _ in range(2):
        drafting.begin([1, 3, 0, 2])
        assert not drafting.decode()
        assert owner.idx_mapping[:REQUESTS].tolist() == slots
        assert not drafting.is_on
    assert vllm_log.getvalue().count("ragged drafting failed") == 1


def test_a_failure_beside_other_ranks_ends_the_step(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = broken(speculator())
    monkeypatch.setattr("faser.engine_adapter.drafting.ragged_v2.has_peers", lambda: True)
    drafting.begin([1, 3, 0, 2])
    with pytest.raises(RuntimeError, match="broken on purpose"):
        drafting.decode()


@pytest.mark.parametrize("unmoved", ["", "pcp_manager", "draft_watermarker", "share_mtp_topk_indices"])
@pytest.mark.parametrize("skip_attn", [False, True])
def test_rounds_with_state_that_does_not_move_along_stay_vllms(rounds: Any, unmoved: str, skip_attn: bool) -> None:
    told: list[str] = []
    owner: Any = object.__new__(vllm_module("v1.worker.gpu.spec_decode.eagle.speculator").EagleSpeculator)
    vars(owner).update(vars(speculator(pcp_manager=None, draft_watermarker=None)) | {unmoved: object()})
    owner._multi_step_decode = lambda *_: told.append("vLLM")

    def decode(*_: Any) -> bool:
        told.append("FASER")
        return True

    assert around_decode(owner, decode)
    owner._multi_step_decode(REQUESTS, skip_attn, None, None, torch.arange(8), LONGEST)
    assert told == ["vLLM" if unmoved or skip_attn else "FASER"]


def test_a_drafter_that_writes_no_kv_of_its_own_is_left_alone() -> None:
    kind = vllm_module("v1.worker.gpu.spec_decode.gemma4.speculator").Gemma4Speculator
    assert not around_decode(object.__new__(kind), lambda *_: True)


def test_dummy_runs_are_vllms_own_also_by_name() -> None:
    seen: list[Any] = []
    owner = SimpleNamespace(propose=lambda input_batch, dummy_run=False, num_speculative_tokens=None: input_batch)
    assert around_propose(SimpleNamespace(speculator=owner), lambda proposal: seen.append(proposal) or proposal.run())
    assert owner.propose(input_batch="dummy", dummy_run=True) == "dummy"
    assert owner.propose("batch", num_speculative_tokens=2) == "batch"
    (proposal,) = seen
    assert (proposal.batch, proposal.rounds, proposal.named()["dummy_run"]) == ("batch", 2, False)
