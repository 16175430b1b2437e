"""What is refused at start, with what to do instead: ranks that would hang, lengths that another would change."""

from types import SimpleNamespace as Config

import pytest

from faser.engine_adapter.hello import refusal


@pytest.mark.parametrize(
    ("ranks", "is_adaptive", "diffusion", "remedy"),
    [(2, False, None, "one server per rank"), (1, True, None, "without FASER"), (1, False, object(), "do not draft")],
)
def test_what_cannot_be_steered_is_refused_with_the_way_out(
    ranks: int, is_adaptive: bool, diffusion: object, remedy: str
) -> None:
    def configured(ranks: int, is_adaptive: bool, diffusion: object) -> str | None:
        speculative = Config(enable_adaptive_verification=is_adaptive)
        parallel = Config(data_parallel_size=ranks)
        return refusal(Config(parallel_config=parallel, speculative_config=speculative, diffusion_config=diffusion))  # type: ignore[arg-type]

    assert remedy in (configured(ranks, is_adaptive, diffusion) or "")
    assert configured(1, False, None) is None
