"""The split is fixed for good: shipped weights were trained on one side of it."""

from hypothesis import given
from hypothesis import strategies as st

from faser.env.workload.held_out import HELD_OUT_SHARE, is_held_out_prompt, is_training_prompt

HELD_OUT_NUMBERS = [1, 4, 6, 9, 12, 17, 27, 29, 35, 36]


def test_known_prompts_stay_on_their_side() -> None:
    assert [n for n in range(40) if is_held_out_prompt(f"prompt number {n}")] == HELD_OUT_NUMBERS


def test_about_a_quarter_is_held_out() -> None:
    share = sum(is_held_out_prompt(f"question {n}") for n in range(4000)) / 4000
    assert abs(share - HELD_OUT_SHARE) < 0.03


@given(st.text())
def test_a_prompt_is_on_exactly_one_side(text: str) -> None:
    assert is_training_prompt(text) != is_held_out_prompt(text)


@given(st.lists(st.text(alphabet="abcdé", min_size=1), min_size=1))
def test_white_space_does_not_move_a_prompt(words: list[str]) -> None:
    assert is_training_prompt(" ".join(words)) == is_training_prompt("  " + "\n\n\t".join(words) + " \n")


def test_unicode_form_does_not_move_a_prompt() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert is_training_prompt(composed) == is_training_prompt(decomposed)
