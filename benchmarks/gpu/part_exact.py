"""Whether FASER's answers are the target's on vLLM's V2 runner: the real pair, lengths of every kind.

The lengths are drawn for each request and step (tests/engine_adapter/v2/steer.py), which is harder than any policy. Of
the answers without speculation the gap between the two likeliest tokens is kept: where they differ at a gap that
rounding bridges, the sums came in another order, and nothing was wrong.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import engines
from checkout import ROOT, Missing, make_importable

PROMPTS: Final = ROOT / "env" / "workload" / "prompts"
LONGEST: Final = 4
REQUESTS, ANSWER_TOKENS = 16, 96
LAYERS: Final = (8, 15)  # of 30, behind which rows leave
# Gaps in logits that another order of sums may bridge: in bfloat16 four steps of what vLLM keeps of a logit above 32.
ROUNDING: Final = {"float32": 1e-3, "bfloat16": 1.0}
LAG: Final = 2  # steps until the time of drafting beside one is told


def measure(is_dry: bool, arm: str, dtype: str = "float32") -> dict[str, Any]:
    """Generate with one arm; `none`, or how FASER runs: `sync`, `async`, `adaptive`, `groups` that take turns, `splits`
    of the SMs, which change every few steps, `pruning`: rows leave at random, between halves of the graphs.

    :param dtype: in bfloat16 attention is FlashAttention's own, and rounding decides more often.
    """
    engines.require_vllm()
    # Triton's products of float32 are tf32 unless told so: good for speed, not for comparing tokens.
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    make_importable()
    sys.path.insert(0, str(engines.TESTS))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FASER_RUNTIME_DIR": folder, "FASER_ENDPOINT": f"ipc://{folder}/nobody", "FASER_DEFAULT_K": "0"}
        os.environ["FASER_PING_PONG"] = "always" if arm in ("groups", "splits") else "never"
        os.environ["FASER_SPLITS"] = ",".join(engines.SPLITS) if arm == "splits" else ""
        pair = tiny_pair(Path(folder)) if is_dry else real_pair()
        generated = _pruned if arm == "pruning" else generate
        return {"dtype": dtype} | generated(arm, *pair, is_dry, dtype)


def _pruned(
    arm: str, model: str, chosen: dict[str, Any], prompts: list[Any], is_dry: bool, dtype: str
) -> dict[str, Any]:
    """Return the same with random cuts, and how many there were."""
    import prunings

    noted = prunings.prune_at_random([1] if is_dry else list(LAYERS), [0.2, 0.5, 0.9])
    os.environ["FASER_PRUNE"] = "always"
    found = generate(arm, model, chosen, prompts, is_dry, dtype)
    left = [sum(row[1] for row in step["rows"]) for step in noted]
    return found | {"cuts": {"steps": len(noted), "cut": sum(map(bool, left)), "rows_left": sum(left)}}


def real_pair() -> tuple[str, dict[str, Any], list[Any]]:
    """Return the embedded target, its head, and prompts of all kinds."""
    try:
        from faser.models.embedded.pair import CacheError, ensure_embedded_drafter, ensure_embedded_target
    except ImportError as error:
        raise Missing(f"the embedded pair needs more: {error}") from error
    try:
        target, head = ensure_embedded_target(), ensure_embedded_drafter()
    except (CacheError, ImportError) as error:
        raise Missing(f"the embedded pair: {error}") from error
    kinds = sorted(PROMPTS.glob("*.jsonl"))
    texts = [json.loads(line)["text"] for kind in kinds for line in kind.read_text().splitlines()[:20]]
    short = sorted(texts, key=len)[:: max(len(texts) // REQUESTS, 1)][:REQUESTS]
    return str(target), {"method": "eagle3", "model": str(head)}, [{"prompt": text[:1500]} for text in short]


def tiny_pair(folder: Path) -> tuple[str, dict[str, Any], list[Any]]:
    """Return two tiny models, of which one drafts well for the other."""
    from jobs import prompts
    from tiny_models import VOCABULARY, save_llama

    target, near = save_llama(folder / "target"), save_llama(folder / "near", noise=0.15)
    return str(target), {"method": "draft_model", "model": str(near)}, prompts((5, 17), VOCABULARY)


def generate(
    arm: str, model: str, chosen: dict[str, Any], prompts: list[Any], is_dry: bool, dtype: str
) -> dict[str, Any]:
    """Return the answers' tokens, and what FASER did."""
    kind = {"none": "none", "adaptive": "faser-adaptive"}.get(arm, "faser")
    steer: Any = None
    if arm != "none":
        from steer import Steer, rule_of

        splits = 1 + len(engines.SPLITS) if arm == "splits" else 1
        steer = Steer(rule_of({"random": LONGEST, "seed": 1}), splits=splits)
    options = engines.settings(is_dry, dtype) | engines.drafting(kind, chosen, LONGEST)
    options |= {"skip_tokenizer_init": True} if is_dry else {"max_num_seqs": REQUESTS, "gpu_memory_utilization": 0.5}
    llm = engines.build(model, kind, options, is_dry, is_async=arm != "sync")
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0, max_tokens=6 if is_dry else ANSWER_TOKENS, ignore_eos=True, detokenize=False,
        logprobs=2 if arm == "none" else None,
    )  # fmt: skip
    answers = [answer.outputs[0] for answer in llm.generate(prompts, parameters, use_tqdm=False)]
    told: dict[str, Any] = {
        "arm": arm,
        "engine": engines.facts(llm),
        "tokens": [list(answer.token_ids) for answer in answers],
    }
    if arm == "none":
        return told | {"gaps": [[_gap(place) for place in answer.logprobs] for answer in answers]}
    check = steer.check()
    late = engines.runner_of(llm).late
    told |= {"is_beside": late is not None and late.is_on, "turns": _turns(steer.log)}
    told |= {"splits": _by_split(steer.log, steer.offered)}
    if (pruning := engines.runner_of(llm).pruning) is not None:
        told |= {"halves": pruning.replays}
    return told | {
        name: check[name]
        for name in ("obeyed", "disobeyed", "misreported", "lengths", "records", "without_report", "rounds",
                     "draft_rows", "rows_if_uniform", "confident", "drafting", "timed")
    }  # fmt: skip


def _turns(log: list[dict[str, Any]]) -> int:
    """Return in how many steps nobody was who was in the step before."""
    return sum(before["rows"].keys().isdisjoint(now["rows"]) for before, now in pairwise(log))


def _by_split(log: list[dict[str, Any]], offered: list[str]) -> dict[str, dict[str, float]]:
    """Return by the split that was told how many steps it had, and medians of both phases, in ms.

    A step tells what drafting two steps before it took: the first ones under a split are left out.
    """
    found: dict[str, list[list[float]]] = {}
    told = [entry["splits"][1] for entry in log]
    for at, entry in enumerate(log):
        if entry["times_s"] is None or told[at] is None or len(set(told[max(at - LAG, 0) : at + 1])) > 1:
            continue
        verify_s, _, draft_s, _ = entry["times_s"]
        if verify_s > 0.0 and draft_s > 0.0:
            found.setdefault(offered[told[at]], []).append([verify_s, draft_s])
    return {
        name: {"steps": len(times), "verify_ms": _median_ms(times, 0), "draft_ms": _median_ms(times, 1)}
        for name, times in found.items()
    }


def _median_ms(times_s: list[list[float]], column: int) -> float:
    return round(1e3 * statistics.median(each[column] for each in times_s), 4)


def _gap(place: dict[int, Any]) -> float:
    """Return by how much the likeliest token is ahead, in logits."""
    first, second = sorted((each.logprob for each in place.values()), reverse=True)[:2]
    return round(first - second, 6)


def verdict(none: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Compare two arms' answers: requests that differ, and of each the place and the gap there."""
    apart, rounding = [], ROUNDING[other["dtype"]]
    for request, (one, two) in enumerate(zip(none["tokens"], other["tokens"], strict=True)):
        place = next((at for at, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            apart.append({"request": request, "place": place, "gap": none["gaps"][request][place]})
    told = "equal" if not apart else "ties" if all(each["gap"] < rounding for each in apart) else "different"
    return {"verdict": told, "requests": len(none["tokens"]), "apart": apart}
