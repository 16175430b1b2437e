"""What is refused at start, with what to do instead: ranks that would hang, models without drafts."""

from types import SimpleNamespace as Config

import pytest

from faser.engine_adapter.hello import refusal


@pytest.mark.parametrize(
    ("ranks", "diffusion", "remedy"),
    [(2, None, "one server per rank"), (1, object(), "do not draft")],
)
def test_what_cannot_be_steered_is_refused_with_the_way_out(ranks: int, diffusion: object, remedy: str) -> None:
    def configured(ranks: int, diffusion: object) -> str | None:
        speculative = Config(enable_adaptive_verification=True)
        parallel = Config(data_parallel_size=ranks)
        return refusal(Config(parallel_config=parallel, speculative_config=speculative, diffusion_config=diffusion))  # type: ignore[arg-type]

    assert remedy in (configured(ranks, diffusion) or "")
    assert configured(1, None) is None


@pytest.mark.parametrize(
    ("rule", "is_v2", "is_refused"), [("block", True, True), ("block", False, False), ("standard", True, False)]
)
def test_a_rejection_rule_that_leaves_the_targets_distribution_is_refused(
    rule: str, is_v2: bool, is_refused: bool
) -> None:
    speculative, parallel = Config(rejection_sample_method=rule), Config(data_parallel_size=1)
    config = Config(parallel_config=parallel, speculative_config=speculative, use_v2_model_runner=is_v2)
    reason = refusal(config)  # type: ignore[arg-type]
    assert (reason is not None) is is_refused
    assert not is_refused or "use standard instead" in str(reason)
