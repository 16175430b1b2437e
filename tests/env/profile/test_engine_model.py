"""The step-time model: its terms, its refusals, and profiles as files."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from faser.env.profile.engine_profile import (
    DOMAIN,
    EngineProfile,
    OutsideProfile,
    ProfileError,
    Range,
    Work,
    check,
    load_profile,
    save_profile,
    synthetic_profile,
)
from faser.env.profile.step_basis import DRAFT_BASIS, VERIFY_BASIS, padded_rows

from ..copying import match_model

WORK = Work(requests=8, decode_rows=24, draft_tokens=16, sampled_rows=24, kv_tokens=4000, drafting_requests=8,
            rounds=2, draft_rows=16, first_rows=20)  # fmt: skip


def test_rows_are_spread_over_their_segments() -> None:
    basis = dict(zip(VERIFY_BASIS, Work(1, 24).verify_basis(), strict=True))
    assert [basis[f"rows {part}"] for part in ("0..2", "2..4", "4..8", "8..16", "16..32", "32..64")] == [
        2,
        2,
        4,
        8,
        8,
        0,
    ]
    assert sum(value for name, value in basis.items() if name.startswith("rows")) == 24


def test_more_work_never_takes_less_time() -> None:
    profile = synthetic_profile()
    times = [sum(profile.step_time(Work(4, rows, rows - 4, sampled_rows=rows))[:2]) for rows in range(4, 900, 7)]
    assert (np.diff(times) >= 0.0).all()


def test_the_published_fit_is_what_the_synthetic_profile_predicts() -> None:
    found = synthetic_profile().step_time(WORK)
    assert found.verify_s == pytest.approx(5.886e-3 + 24 * 21e-6 + 4000 * 39e-9)
    assert found.draft_s == pytest.approx(2 * 2.135e-3)


def test_nothing_drafted_costs_no_round() -> None:
    basis = dict(zip(DRAFT_BASIS, Work(8, 8).draft_basis(), strict=True))
    assert basis.pop("step") == 1.0
    assert not any(basis.values())


def test_graphs_run_the_next_captured_size_and_larger_batches_as_they_are() -> None:
    sizes = np.array([1.0, 2.0, 4.0, 8.0])
    assert [padded_rows(rows, sizes) for rows in (1.0, 3.0, 8.0, 9.0)] == [1.0, 4.0, 8.0, 9.0]
    assert padded_rows(5.0, np.zeros(0)) == 5.0


def test_a_step_outside_the_measurement_is_refused_and_named() -> None:
    profile = msgspec.structs.replace(synthetic_profile(), domain={"rows": Range(1, 20)})
    with pytest.raises(OutsideProfile, match=r"rows 24; .* from 1 to 20"):
        profile.step_time(WORK)


def test_uncertainty_comes_from_the_covariance_of_the_coefficients() -> None:
    profile = synthetic_profile()
    unit = tuple(tuple(0.01 * (i == j) for j in range(len(VERIFY_BASIS))) for i in range(len(VERIFY_BASIS)))
    sure = msgspec.structs.replace(profile.verify, covariance=unit)
    found = msgspec.structs.replace(profile, verify=sure).step_time(Work(1, 1))
    assert 0.05 < found.verify_deviation_s / found.verify_s < 0.11


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile = synthetic_profile(graph_sizes=(1, 2, 4))
    save_profile(profile, path)
    assert load_profile(path) == profile


def spoil(profile: EngineProfile, **changes: object) -> bytes:
    return json.dumps({**json.loads(msgspec.json.encode(profile)), **changes}).encode()


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"", "p.json"),
        (b"{", "p.json"),
        (b"SQLite format 3\x00", "p.json"),
        (spoil(synthetic_profile(), version=99), "profile version 99"),
        (spoil(synthetic_profile(), kv_blocks=0), "kv_blocks"),
        (spoil(synthetic_profile(), strange=1), "strange"),
        (spoil(synthetic_profile(), ahead={"ready": 1.5}), "ahead: .*expected shares in 0..1"),
        (spoil(synthetic_profile(), ahead={"verify_factor": 0.0}), "finite factor above 0"),
        (spoil(synthetic_profile(), domain={"sheep": {"low": 0, "high": 1}}), "domain: sheep"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_name(tmp_path: Path, content: bytes, seen: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=seen):
        load_profile(path)


def test_negative_infinite_and_foreign_coefficients_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    profile = synthetic_profile()
    for value in (-1e-9, float("inf"), float("nan")):
        bad = msgspec.structs.replace(profile.verify, coefficients=(value, *profile.verify.coefficients[1:]))
        with pytest.raises(ProfileError, match="verify"):
            save_profile(msgspec.structs.replace(profile, verify=bad), tmp_path / "p.json")
    other = msgspec.structs.replace(profile.draft, basis=("sheep", *profile.draft.basis[1:]))
    with pytest.raises(ProfileError, match=r"draft\.basis"):
        save_profile(msgspec.structs.replace(profile, draft=other), tmp_path / "p.json")
    assert not list(tmp_path.iterdir())


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none\.json: cannot be read"):
        load_profile(tmp_path / "none.json")


def test_the_domain_covers_every_measured_quantity() -> None:
    assert set(WORK.quantities()) == set(DOMAIN)


def test_matches_come_back_from_a_file_and_older_files_have_none(tmp_path: Path) -> None:
    path, profile = tmp_path / "p.json", msgspec.structs.replace(synthetic_profile(), matches=match_model())
    save_profile(profile, path)
    assert load_profile(path) == profile
    older = json.loads(path.read_bytes())
    del older["matches"]
    path.write_text(json.dumps(older))
    assert load_profile(path).matches is None


@pytest.mark.parametrize(
    ("changes", "seen"),
    [({"after_other": float("inf")}, "finite logits"), ({"spread": -1.0}, "spread of at least 0"),
     ({"lengths": (0.5, 0.4)}, "sum to 1"), ({"lengths": (1.5, -0.5)}, "shares"), ({"lengths": (1.0,)}, "expected 1"),
     ({"quantiles_whole": ((0.0, 1.0),)}, "expected 8 of 33")],
)  # fmt: skip
def test_matches_that_cannot_be_are_refused(changes: dict[str, object], seen: str) -> None:
    bad = msgspec.structs.replace(match_model(), **changes)
    with pytest.raises(ProfileError, match=f"engine, matches: .*{seen}"):
        check(msgspec.structs.replace(synthetic_profile(), matches=bad), "engine")
