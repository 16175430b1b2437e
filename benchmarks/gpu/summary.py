"""What day.py found, in lines to be read: exactness, tokens/s of every arm, and what lies below the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from part_exact import verdict

Parts = dict[str, dict[str, Any]]


def lines(content: dict[str, Any]) -> list[str]:
    """Return the lines of a results file."""
    parts = {name: part["result"] for name, part in content["parts"].items() if "result" in part}
    told = [f"{name}: {value}" for name, value in content["machine"].items()]
    told += [*_exactness(parts), *_serving(parts), *_kernels(parts), *_sanitizer(parts), *_shares(parts)]
    told += _pruning(parts)
    for name, part in content["parts"].items():
        if "result" not in part:
            told.append(f"{name}: {part.get('error') or 'skipped: ' + part['skipped']}")
    return told


def _exactness(parts: Parts) -> Iterator[str]:
    for name, found in parts.items():
        none = parts.get(f"{name.rpartition('/')[0]}/none")  # of the same type
        if none is not None and name.startswith("exact/") and found is not none:
            told = verdict(none, found)
            obeyed = f"{found['obeyed']} lengths obeyed, {len(found['disobeyed'])} not"
            yield f"{name}: {told['verdict']}, {len(told['apart'])} of {told['requests']} answers apart; {obeyed}"
            if (cuts := found.get("cuts")) is not None:
                done = f"{cuts['cut']} of {cuts['steps']} steps cut, {cuts['rows_left']} rows left"
                yield f"{name}: {done}, {found['halves']} steps replayed in halves"
            for split, own in found.get("splits", {}).items():
                phases = f"verifying {own['verify_ms']} ms, drafting {own['draft_ms']} ms"
                yield f"{name}: {split}, {own['steps']} steps: {phases}"


def rates(parts: Parts) -> dict[str, dict[str, float]]:
    """Return tokens/s by load and arm; the best table is the best length of that load."""
    found: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        if not name.startswith("serve/"):
            continue
        for key, result in part["loads"].items():
            load, _, length = key.partition("/")
            arm = f"table {length}" if length else part["arm"]
            found.setdefault(load, {})[arm] = result["tokens_per_s"]
    for own in found.values():
        if tables := [rate for arm, rate in own.items() if arm.startswith("table ")]:
            own["best table"] = max(tables)
    return found


def _serving(parts: Parts) -> Iterator[str]:
    for load, own in rates(parts).items():
        told = ", ".join(f"{arm} {rate:.0f}" for arm, rate in own.items())
        over = [f"{own[mine] / rate:.3f} over {arm}" for mine in ("faser", "faser-adaptive") if mine in own
                for arm, rate in own.items() if arm in ("none", "best table", "adaptive", "k3")]  # fmt: skip
        yield f"{load} requests, tokens/s: {told}; FASER {', '.join(over) or 'not measured'}"


def _kernels(parts: Parts) -> Iterator[str]:
    if (found := parts.get("decoder")) is not None:
        yield f"decoder: kernels at most {max(found.values()):.1e} from their references"
    if (found := parts.get("kernel")) is not None:
        for dtype, own in found["agreement"].items():
            yield f"kernel, {dtype}: {own['equal_requests']} of {own['requests']} requests decided alike"
        for requests, own in found["times_ms"].items():
            kernel_ms, reference_ms = own["kernel"]["median"], own["reference"]["median"]
            yield f"kernel, {requests} requests: {kernel_ms:.3f} ms, reference {reference_ms:.3f}"


def _sanitizer(parts: Parts) -> Iterator[str]:
    for check, own in parts.get("sanitizer", {}).items():
        if "failed" in own:
            yield f"sanitizer, {check}: failed: {own['failed']}"
            continue
        runs, agreed = (sum(each[name] for each in own["kernels"].values()) for name in ("runs", "agreed"))
        if check == "plain":
            yield f"sanitizer, nobody watching: {agreed} of {runs} runs of {len(own['kernels'])} kernels agreed"
        elif (expected := own.get("expected_in")) is None:
            places = f" in {', '.join(own['in'])}" if own["in"] else ""
            yield f"sanitizer, {check}: errors: {own['errors']}{places}; {agreed} of {runs} runs agreed"
        else:
            seen, end = len(set(expected) & set(own["in"])), "" if own["has_ended"] else "; the program ended early"
            yield f"sanitizer, {check}: seen in {seen} of {len(expected)} kernels, errors: {own['errors']}{end}"


def _shares(parts: Parts) -> Iterator[str]:
    for name in ("splits", "overlap"):
        for requests, found in parts.get(name, {}).get("requests", {}).items():
            for partition, own in found["partitions"].items():
                yield (
                    f"{name}, {requests} requests, {partition} ({own['allocated'][0]}+{own['allocated'][1]}): draft "
                    f"{own['draft_ms']['median']:.2f} ms, verify {own['verify_ms']['median']:.2f}, together "
                    f"{own['step_ms']['median']:.2f}: interference {own['interference']['median']:.2f}, gain "
                    f"{own['gain']['median']:.2f} of at most {found['ahead_bound']:.2f}"
                )
    for requests, found in parts.get("overlap", {}).get("ping_pong", {}).items():
        yield f"ping-pong, {requests} requests: " + ", ".join(f"{name} {gain:.2f}" for name, gain in found.items())


def _pruning(parts: Parts) -> Iterator[str]:
    for requests, found in parts.get("pruning", {}).items():
        gains = ", ".join(f"{arm} {gain['median']:.2f}" for arm, gain in found["gain"].items())
        yield f"pruning, {requests} requests, {found['rows']} rows, over the whole pass: {gains} rows kept"
