"""How far two sources of drafts can go: `python benchmarks/sources.py --answers FILE --out FILE [--profile FILE]`.

The answers are the embedded target's own to held-out prompts, as `benchmarks/matches.py --answers FILE` writes them.
For every place of every answer this looks up how many tokens the released head would have drafted right
(models/drafter, at the target's own states) and how many a match would (engine_adapter/matching). Then a constant
number of requests is served from these records, with the step times of a profile: no speculation, the head at each
fixed length, matches alone, the best fixed rule that mixes them (length, price of a row and worth searched for at each
load), and hindsight, which knows what will be accepted and picks by prices that it learns: near the best that can be
had, not proved to be it. Acceptance is real, times are a model's: so this says what a policy can choose from.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from matches import Answer

from faser.engine_adapter.arrays import Floats, Ints
from faser.engine_adapter.matching.texts import CopiedDrafts, Texts, kept_of
from faser.env.profile.engine_profile import EngineProfile, Work, load_profile, shipped_profile
from faser.env.workload.prompts import KINDS
from faser.models.drafter.corpus import Conversation
from faser.models.drafter.evaluate import draft_chains
from faser.models.drafter.features import CacheIdentity, build_cache
from faser.models.drafter.initial_weights import read_own_weights
from faser.models.drafter.network import DraftHead, HeadShape, pack
from faser.models.drafter.teacher import Teacher
from faser.models.embedded.pair import ensure_embedded_pair

DEPTH: Final = 4  # of the head's drafts
LONGEST: Final = 8  # of copies
LOADS: Final = (1, 2, 4, 8, 16, 32)
TOKENS: Final = 3000  # to serve at each load
KEEPS: Final = (0.1, 0.3, 0.6)  # survivals from which a row of a copy is verified
WORTHS: Final = (0.0, 0.6, 1.2)  # tokens that a copy must promise beyond its rows, where the head drafts
NEVER: Final = 2.0  # a survival that no copy has
HINTS: Final = 4  # times that hindsight's prices are made from what they led to


class Record(NamedTuple):
    """One answer; place p is drafted from when its tokens 0..p are known."""

    kind: str
    prompt_tokens: int
    head: Ints  # (places,) tokens of the head's draft that would be accepted
    offered: Ints  # (places,) tokens of the match
    right: Ints  # (places,) ... that would be accepted
    logits: Floats  # (places, LONGEST) of their chances, as the engine tells them


@dataclass(frozen=True, slots=True)
class Rule:
    """A fixed way to draft."""

    length: int = 0  # of the head's drafts
    keep: float = NEVER
    worth: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens/s of one kind of prompts at one load; ratios beside what they are of."""

    kind: str
    temperature: float
    load: int
    none: float
    heads: tuple[float, ...]  # at lengths 1..DEPTH
    copies: float  # at the best price of a row
    mixed: float  # the best fixed rule
    mixed_rule: str
    hindsight_head: float
    hindsight_copies: float
    hindsight: float
    mixed_of_single: float  # mixed over the best of the head at a fixed length and of copies alone
    hindsight_of_single: float


def head_hits(pair: Any, answers: Sequence[Answer], temperature: float) -> list[Ints]:
    """Return for each answer how many of the head's DEPTH tokens are right, at all places but the last few."""
    teacher = Teacher(pair.target, "cpu")
    card = json.loads((pair.drafter / "config.json").read_text())
    layers = tuple(card["eagle_aux_hidden_state_layer_ids"])
    shape = HeadShape.of(teacher.shape, len(layers), card["intermediate_size"])
    weights = pair.drafter / "model.safetensors"
    ids = draft_vocabulary(weights)
    head = DraftHead(shape, read_own_weights(weights, shape), teacher.embedding)
    rows = [Conversation(tuple(a.prompt), tuple(a.said), temperature, a.kind, False) for a in answers]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        identity = CacheIdentity(
            target="", corpus="", aux_layers=layers, teacher_top=1, draft_vocabulary=tuple(ids.tolist())
        )
        cache = build_cache(Path(folder) / "features", identity, teacher, rows, 3400, lambda done, total: None)
        for address in cache.addresses:
            batch = pack([cache.read(address)], head.device)
            chains = draft_chains(head, teacher.head[ids], ids, batch, DEPTH)
            found.append(torch.stack([each.hit for each in chains]).sum(0).numpy().astype(np.int64))
    return found


def draft_vocabulary(weights: Path) -> torch.Tensor:
    """Return the target's token ids of the head's tokens."""
    from safetensors import safe_open

    with safe_open(str(weights), framework="pt") as file:
        steps = file.get_tensor("d2t")
    ids: torch.Tensor = steps + torch.arange(len(steps))
    return ids


def record_of(answer: Answer, head: Ints) -> Record:
    """Return an answer with what matches would draft at each of the head's places."""
    texts, tokens = Texts(1 << 24), np.array(answer.prompt + answer.said, np.int32)
    places, most = len(head), np.array([LONGEST])
    offered, right, logits = (
        np.zeros(places, np.int64), np.zeros(places, np.int64), np.zeros((places, LONGEST)),
    )  # fmt: skip
    for place in range(places):
        end = len(answer.prompt) + place + 1
        drafts = texts.find(["it"], [tokens[: end - 1]], tokens[None, end - 1 : end], most)
        offered[place] = length = int(drafts.lengths[0])
        follows = tokens[end : end + length]
        right[place] = int(np.cumprod(drafts.tokens[0, : len(follows)] == follows).sum())
        logits[place, :length] = drafts.logits[0, :length]
    return Record(answer.kind, len(answer.prompt), head, offered, right, logits)


class Batch:
    """A constant number of requests that are served from records, and the clock of a profile."""

    def __init__(self, records: Sequence[Record], load: int, profile: EngineProfile) -> None:
        self.records, self.load, self.profile = records, load, profile
        self.order = np.random.default_rng(0).permutation(len(records)).tolist()
        self.next = 0
        self.at = [self._fresh() for _ in range(load)]
        for slot, (record, _) in enumerate(list(self.at)):  # answers are at different places, as in any stream
            self.at[slot] = (record, (slot * len(record.head)) // (load + 1))
        self.tokens, self.seconds = 0, 0.0

    def _fresh(self) -> tuple[Record, int]:
        record = self.records[self.order[self.next % len(self.order)]]
        self.next += 1
        return record, 0

    def step_s(self, copied: int, drafted: int, drafting: int, rounds: int) -> float:
        """Return the seconds of a step that verifies these tokens; the head's are drafted in it."""
        context = sum(record.prompt_tokens + place for record, place in self.at)
        rows, mean = self.load + copied + drafted, context / self.load
        work = Work(
            self.load, rows, copied + drafted, sampled_rows=rows, kv_tokens=context, attended_tokens=round(rows * mean),
            drafting_requests=drafting, rounds=rounds, draft_rows=drafted, first_rows=drafting + drafted,
            kept_rows=self.load - drafting if drafting < self.load else 0, draft_attended_tokens=round(drafted * mean),
        )  # fmt: skip
        packed = self.profile.packed()
        return float(
            work.verify_basis() @ packed.verify + work.draft_basis() @ packed.draft + work.host_basis() @ packed.host
        )

    def advance(self, accepted: Sequence[int], step_s: float) -> None:
        """Emit what was accepted and a token each."""
        for slot, hits in enumerate(accepted):
            record, place = self.at[slot]
            place += hits + 1
            self.tokens += hits + 1
            self.at[slot] = (record, place) if place < len(record.head) else self._fresh()
        self.seconds += step_s

    @property
    def rate(self) -> float:
        """Tokens/s so far."""
        return self.tokens / self.seconds


def served(records: Sequence[Record], load: int, profile: EngineProfile, rule: Rule) -> float:
    """Return the tokens/s of a fixed rule."""
    batch = Batch(records, load, profile)
    curve = np.ones(LONGEST), np.zeros(LONGEST), np.full((load, LONGEST), rule.keep)
    while batch.tokens < TOKENS:
        logits = np.stack([record.logits[place] for record, place in batch.at])
        offered = np.array([record.offered[place] for record, place in batch.at])
        drafts = CopiedDrafts(load, LONGEST)
        drafts.logits, drafts.lengths = logits, offered
        kept, net = kept_of(drafts, *curve)
        copies = (kept > 0) & ((net > rule.worth) | (rule.length == 0))
        hits = [
            min(int(record.right[place]), int(kept[slot]))
            if copies[slot]
            else min(int(record.head[place]), rule.length)
            for slot, (record, place) in enumerate(batch.at)
        ]
        drafting = int((~copies).sum()) if rule.length else 0
        copied = int(kept[copies].sum())
        batch.advance(hits, batch.step_s(copied, drafting * rule.length, drafting, rule.length if drafting else 0))
    return batch.rate


def in_hindsight(
    records: Sequence[Record], load: int, profile: EngineProfile, has_head: bool = True, has_copies: bool = True
) -> float:
    """Return the tokens/s of one who knows what will be accepted, and verifies nothing else."""
    batch, rate = Batch(records, load, profile), load / Batch(records, load, profile).step_s(0, 0, 0, 0)
    while batch.tokens < TOKENS:
        heads = [int(record.head[place]) * has_head for record, place in batch.at]
        copies = [int(record.right[place]) * has_copies for record, place in batch.at]
        plans = [_plan(batch, heads, copies, rounds, rate) for rounds in range(DEPTH * has_head + 1)]
        hits, step_s = max(plans, key=lambda plan: sum(plan[0]) + load - rate * plan[1])
        batch.advance(hits, step_s)
        rate += (batch.rate - rate) * 0.05
    return batch.rate


def _plan(
    batch: Batch, heads: Sequence[int], copies: Sequence[int], rounds: int, rate: float
) -> tuple[list[int], float]:
    """Return the accepted tokens of each request and the step's time, with so many rounds at most."""
    row_s, extra_s, best = 0.0, 0.0, ([0] * batch.load, batch.step_s(0, 0, 0, 0))
    for _ in range(HINTS):
        hits, copied, drafted, drafting, deepest = [], 0, 0, 0, 0
        for head, copy in zip(heads, copies, strict=True):
            by_head = min(head, rounds)
            worth_head = by_head * (1.0 - rate * (row_s + extra_s))
            worth_copy = copy * (1.0 - rate * row_s)
            if worth_copy >= worth_head:
                hits.append(copy if worth_copy > 0.0 else 0)
                copied += hits[-1]
            else:
                hits.append(by_head)
                drafted, drafting, deepest = drafted + by_head, drafting + 1, max(deepest, by_head)
        step_s = batch.step_s(copied, drafted, drafting, deepest)
        if sum(hits) - rate * step_s > sum(best[0]) - rate * best[1]:
            best = (hits, step_s)
        row_s = batch.step_s(copied + 1, drafted, drafting, deepest) - batch.step_s(copied, drafted, drafting, deepest)
        both_s = batch.step_s(copied, drafted + 1, drafting + 1, max(deepest, 1))
        extra_s = max(both_s - batch.step_s(copied, drafted, drafting, deepest) - row_s, 0.0)
    return best


def rates_of(kind: str, temperature: float, records: Sequence[Record], load: int, profile: EngineProfile) -> Rates:
    """Return what each way to draft gives."""
    by_rule = {rule: served(records, load, profile, rule) for rule in _rules()}
    heads = tuple(by_rule[Rule(length)] for length in range(1, DEPTH + 1))
    copies = max(by_rule[Rule(0, keep)] for keep in KEEPS)
    best = max(by_rule, key=by_rule.__getitem__)
    head, copied, both = (
        in_hindsight(records, load, profile, *has) for has in ((True, False), (False, True), (True, True))
    )
    single, none = max(*heads, copies), by_rule[Rule()]
    return Rates(
        kind, temperature, load, none, heads, copies, by_rule[best], f"{best.length}:{best.keep:g}:{best.worth:g}",
        head, copied, both, by_rule[best] / max(single, none), both / max(single, none),
    )  # fmt: skip


def _rules() -> Iterator[Rule]:
    for length in range(DEPTH + 1):
        yield Rule(length)
    for length, keep, worth in product(range(DEPTH + 1), KEEPS, WORTHS):
        if length or not worth:
            yield Rule(length, keep, worth)


def rounded(rates: Rates) -> dict[str, Any]:
    """Return a line for the file."""
    return json.loads(json.dumps(asdict(rates)), parse_float=lambda text: round(float(text), 3))  # type: ignore[no-any-return]


def main() -> None:
    """Print a line for each kind, temperature and load, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--profile", type=Path, help="of faser profile; default: the shipped one")
    arguments = parser.parse_args()
    profile = load_profile(arguments.profile) if arguments.profile else shipped_profile()
    told, pair = json.loads(arguments.answers.read_text()), ensure_embedded_pair()
    result: dict[str, Any] = {
        "answers": len(told),
        "profile": profile.name,
        "machine": profile.card.machine,
        "rows": [],
    }
    for temperature in sorted({each["temperature"] for each in told}):
        answers = [Answer(each["kind"], each["prompt"], each["said"]) for each in told
                   if each["temperature"] == temperature and len(each["said"]) > DEPTH + 1]  # fmt: skip
        hits = head_hits(pair, answers, temperature)
        records = [record_of(answer, found) for answer, found in zip(answers, hits, strict=True)]
        for kind, load in product((*KINDS, "all"), LOADS):
            chosen = [record for record in records if kind in ("all", record.kind)]
            result["rows"].append(rounded(rates_of(kind, temperature, chosen, load, profile)))
            print(json.dumps(result["rows"][-1]), flush=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
