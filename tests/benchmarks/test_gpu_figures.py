"""The GPU day's arithmetic by hand: what is imposed, what is measured, what is summed up, and the stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from faser.env.calibration.accept_traces import shipped_accept_trace
from faser.env.calibration.acceptance_fit import auc, fit_acceptance
from faser.env.profile.acceptance_model import QUANTILES

Module = Callable[[str], ModuleType]


@pytest.fixture
def imposed(gpu: Module) -> ModuleType:
    return gpu("imposed")


def asked(requests: int, places: int, longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (requests * places * longest,) requests, places and steps of as many whole drafts."""
    cells = torch.cartesian_prod(torch.arange(requests), torch.arange(places), torch.arange(longest))
    return cells[:, 0], cells[:, 1] + cells[:, 2], cells[:, 2]


def test_what_is_imposed_is_the_measured_run(imposed: ModuleType) -> None:
    model = fit_acceptance(shipped_accept_trace("spec_bench__eagle"), 5)
    assert model.intercepts == pytest.approx(imposed.INTERCEPTS, abs=1e-4)
    assert (model.slopes, model.request_share, model.carry) == ((1.0,) * 5, imposed.REQUEST_SHARE, imposed.CARRY)
    assert model.hidden == pytest.approx(imposed.HIDDEN, abs=1e-4)
    for step, quantiles in enumerate(model.quantiles):
        middle, furthest = imposed.MEAN_LOGIT - imposed.DROP * step, imposed.SPREAD * imposed.FURTHEST
        assert quantiles[QUANTILES // 2] == pytest.approx(middle, abs=1e-9)
        assert (quantiles[0], quantiles[-1]) == pytest.approx((middle - furthest, middle + furthest), abs=1e-3)


def test_fates_are_those_of_the_measured_run_and_requests_differ(imposed: ModuleType) -> None:
    model = fit_acceptance(shipped_accept_trace("spec_bench__eagle"), 5)
    fates = imposed.Fates(5, torch.device("cpu"))
    accepted = fates.are_accepted(*asked(400, 40, 5)).view(400, 40, 5)
    for step in range(5):  # means are of drafts that were accepted up to there
        survived = accepted[:, :, :step].all(dim=2)
        assert accepted[..., step][survived].float().mean().item() == pytest.approx(model.means[step], abs=0.03)
    rates = accepted[..., 0].float().mean(1)
    luck = (rates.mean() * (1.0 - rates.mean()) / 40).item()
    assert rates.var().item() > 1.2 * luck
    logits = fates.logits(*asked(400, 40, 5)).view(400, 40, 5)
    assert 0.75 < auc(logits[..., 0].double().flatten().numpy(), accepted[..., 0].flatten().numpy()) < 0.9


def test_every_arm_meets_the_same_luck_whatever_it_asks_first(imposed: ModuleType) -> None:
    one, other = imposed.Fates(5, torch.device("cpu")), imposed.Fates(3, torch.device("cpu"))
    cells = asked(20, 10, 3)
    order = torch.randperm(len(cells[0]), generator=torch.Generator().manual_seed(1))
    assert torch.equal(one.are_accepted(*cells)[order], other.are_accepted(*(each[order] for each in cells)))
    assert torch.allclose(one.logits(*cells)[order], other.logits(*(each[order] for each in cells)))
    with pytest.raises(ValueError, match="at most 5"):
        imposed.Fates(6, torch.device("cpu"))


def decree(imposed: ModuleType) -> Any:
    """Return a decree upon no engine, of two requests in slots 3 and 1."""
    made = object.__new__(imposed.Decree)
    made._longest, made._fates = 3, imposed.Fates(3, torch.device("cpu"))
    made._requests = torch.tensor([0, 70, 0, 90, 0])
    return made


def test_the_decree_raises_a_drafts_own_token_where_its_fate_is_to_be_accepted_and_another_elsewhere(
    imposed: ModuleType,
) -> None:
    made, seen = decree(imposed), list[torch.Tensor]()
    # Slot 3 has two drafts behind the token at place 100, slot 1 none: it reads the end of its prompt.
    batch = SimpleNamespace(
        input_ids=torch.tensor([9, 4, 5, 8], dtype=torch.int32), logits_indices=torch.arange(4),
        expanded_local_pos=torch.tensor([0, 1, 2, 0], dtype=torch.int32),
        expanded_idx_mapping=torch.tensor([3, 3, 3, 1], dtype=torch.int32), positions=torch.tensor([100, 101, 102, 69]),
    )  # fmt: skip
    logits = torch.zeros(4, 11)
    made._around_verdict(lambda sampler, raised, own: seen.append(raised), None, logits, batch)
    fates = made._fates.are_accepted(torch.tensor([90, 90]), torch.tensor([100, 101]), torch.tensor([0, 1]))
    for row, draft in enumerate((4, 5)):
        assert (int(seen[0][row].argmax()) == draft) == bool(fates[row])
        assert (seen[0][row] > 1.0).sum() == 1
    assert not seen[0][2:].any()  # a bonus row and a prompt's own are the target's


def test_the_drafters_logits_have_the_confidence_that_is_decreed(imposed: ModuleType) -> None:
    made = decree(imposed)
    hidden, places, slots = torch.zeros(2, 1), torch.tensor([100, 69]), torch.tensor([3, -1])
    spoken = torch.tensor([[0.0] * 20 + [-torch.inf] * 12])  # an EAGLE-3 head does not say every token

    def sample(speculator: Any, hidden: torch.Tensor, *given: Any) -> torch.Tensor:
        told: torch.Tensor = made._around_logits(lambda *_: spoken.expand(2, -1), None, hidden, 0)
        return told

    step = torch.tensor(1)
    logits = made._around_draft(sample, None, hidden, places, slots, torch.zeros(2), torch.zeros(2), step, None)
    wanted = made._fates.logits(torch.tensor([90, 0]), places, torch.tensor([1, 1])).sigmoid()
    likeliest = logits.softmax(-1)[:, :20].max(-1).values
    others = (1.0 - wanted) / 19.0
    assert torch.allclose(likeliest, torch.maximum(wanted, others), atol=1e-4)


# ------------------------------------------------------------------ load, summary, stopwatch


class CountedEngine:
    """An engine whose steps take a second and give every request a token."""

    def __init__(self) -> None:
        self.time_s, self.most, self.requests = 0.0, 0, dict[str, list[int]]()
        self.added_s = list[float]()

    def now_s(self) -> float:
        """Return the made-up time."""
        return self.time_s

    def add(self, name: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Take in a request."""
        self.requests[name] = [0, answer_tokens]
        self.added_s.append(self.time_s)

    def step(self) -> list[tuple[str, int, bool]]:
        """Give everybody a token."""
        self.time_s, self.most = self.time_s + 1.0, max(self.most, len(self.requests))
        told = []
        for name, counts in list(self.requests.items()):
            counts[0] += 1
            told.append((name, counts[0], counts[0] == counts[1]))
            if told[-1][2]:
                del self.requests[name]
        return told


def test_a_closed_loop_keeps_its_clients_busy_and_counts_the_full_batch_only(gpu: Module) -> None:
    load, engine = gpu("load"), CountedEngine()
    requests = load.closed_requests(4, 3, 8, 0)
    assert sorted(each.answer_tokens for each in requests[:4]) == [2, 4, 6, 8]  # staggered
    assert {each.answer_tokens for each in requests[4:]} == {8}
    found = load.drive(engine, requests, 4)
    assert (engine.most, found["requests"]) == (4, 16)
    assert (found["tokens_per_s"], found["tpot_ms"]) == (4.0, 1000.0)
    assert found["seconds"] == engine.added_s[-1] - 1.0  # not while the first are read, nor while the last end


def test_the_best_table_is_the_best_length_of_each_load(gpu: Module) -> None:
    def served(arm: str, **rates: float) -> dict[str, Any]:
        loads = {name.replace("_", "/")[1:]: {"tokens_per_s": rate} for name, rate in rates.items()}
        return {"result": {"arm": arm, "loads": loads}}

    content = {
        "machine": {"gpu": "H200"},
        "parts": {
            "serve/faser": served("faser", n1=180.0, n8=700.0),
            "serve/none": served("none", n1=100.0, n8=500.0),
            "serve/lengths": served("lengths", n1_k1=150.0, n1_k3=200.0, n8_k1=600.0, n8_k3=560.0),
            "serve/adaptive": {"skipped": "refused"},
            "kernel": {"error": "out of memory"},
        },
    }
    told = gpu("summary").lines(content)
    assert told[1].endswith("best table 200; FASER 1.800 over none, 0.900 over best table")
    assert told[2].endswith("best table 600; FASER 1.400 over none, 1.167 over best table")
    assert told[-2:] == ["serve/adaptive: skipped: refused", "kernel: out of memory"]


def test_answers_that_part_where_rounding_decides_are_ties_and_others_are_not(gpu: Module) -> None:
    verdict = gpu("part_exact").verdict
    none = {"tokens": [[1, 2, 3], [4, 5, 6]], "gaps": [[1.0, 1.5, 0.5], [1.0, 1e-4, 1.0]], "dtype": "float32"}
    assert verdict(none, none)["verdict"] == "equal"
    tied = verdict(none, {"tokens": [[1, 2, 3], [4, 7, 7]], "dtype": "float32"})
    assert (tied["verdict"], tied["apart"]) == ("ties", [{"request": 1, "place": 1, "gap": 1e-4}])
    wrong = {"tokens": [[1, 2, 9], [4, 5, 6]]}
    assert verdict(none, wrong | {"dtype": "float32"})["verdict"] == "different"
    assert verdict(none, wrong | {"dtype": "bfloat16"})["verdict"] == "ties"  # two of its steps
    assert verdict(none, {"tokens": [[1, 9, 9], [4, 5, 6]], "dtype": "bfloat16"})["verdict"] == "different"


def test_answers_are_compared_with_those_of_the_same_type(gpu: Module) -> None:
    def told(tokens: list[int], dtype: str, **more: Any) -> dict[str, Any]:
        return {"result": {"tokens": [tokens], "dtype": dtype, "obeyed": 1, "disobeyed": [], **more}}

    parts = {
        "exact/none": told([1, 2], "float32", gaps=[[9.0, 9.0]]),
        "exact/async": told([1, 2], "float32"),
        "exact/bfloat16/none": told([5, 6], "bfloat16", gaps=[[9.0, 9.0]]),
        "exact/bfloat16/pruning": told([5, 6], "bfloat16"),
    }
    assert gpu("summary").lines({"machine": {}, "parts": parts}) == [
        "exact/async: equal, 0 of 1 answers apart; 1 lengths obeyed, 0 not",
        "exact/bfloat16/pruning: equal, 0 of 1 answers apart; 1 lengths obeyed, 0 not",
    ]


def test_arms_ask_vllm_for_what_their_names_say(gpu: Module) -> None:
    drafting = gpu("engines").drafting
    chosen = {"method": "eagle3", "model": "head"}
    config = {
        arm: drafting(arm, chosen, 5)
        for arm in ("none", "k3", "lengths", "adaptive", "faser", "faser-adaptive", "faser-splits")
    }
    assert config["none"] == {}
    assert config["k3"] == {"speculative_config": chosen | {"num_speculative_tokens": 3}}
    table = config["lengths"]["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert {length for _, _, length in table} == {0, 1, 2, 3, 4, 5}
    for arm in ("adaptive", "faser-adaptive"):
        asked_for = chosen | {"num_speculative_tokens": 5, "enable_adaptive_verification": True}
        assert config[arm]["speculative_config"] == asked_for
    assert {arm for arm, own in config.items() if "scheduler_cls" in own} == {"faser", "faser-adaptive", "faser-splits"}


@pytest.mark.parametrize("part", ["part_serve", "part_exact"])
def test_without_vllm_its_parts_say_so(gpu: Module, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(gpu("engines"), "find_spec", lambda name: None)
    with pytest.raises(gpu("checkout").Missing, match="vLLM is not there; --site"):
        gpu(part).measure(True, "none")


def test_arms_take_turns_in_rotating_order_and_keep_their_own_times(
    gpu: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines, order, clock = gpu("machines"), list[str](), [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    def arm(name: str, lasts: float) -> Any:
        def work() -> None:
            order.append(name)
            clock[0] += lasts

        return work

    monkeypatch.setattr(machines.torch.cuda, "Event", Event)
    monkeypatch.setattr(machines.torch.cuda, "synchronize", lambda: None)
    machine = object.__new__(machines.CudaMachine)
    arms = {"a": arm("a", 1.0), "b": arm("b", 2.0), "c": arm("c", 4.0)}
    assert machine.rounds(arms, 3) == {"a": [1.0] * 3, "b": [2.0] * 3, "c": [4.0] * 3}
    assert "".join(order[3 * machines.WARM_UPS :]) == "abcbcacab"


def test_median_and_quartiles(gpu: Module) -> None:
    told = gpu("machines").told
    assert told([3.0, 1.0, 2.0, 5.0, 4.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "count": 5}
    assert told([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0, "count": 1}
