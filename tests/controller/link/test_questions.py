"""The socket for questions and orders: who is answered, and how many before engines have their turn again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from faser.controller.link.endpoint import Endpoint
from faser.controller.link.status_orders import MOST_AT_ONCE, Questions

Socket = zmq.Socket[bytes]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Questions, Socket]]:
    context: zmq.Context[Socket] = zmq.Context()
    with Endpoint(f"ipc://{tmp_path}/s.sock") as endpoint:
        questions, asker = Questions(context, endpoint), context.socket(zmq.DEALER)
        asker.connect(endpoint.address)
        yield questions, asker
        context.destroy(linger=0)


def answer(questions: Questions, frames: int) -> list[bytes]:
    """Answer once so many frames have had time to arrive; return what was asked."""
    asked: list[bytes] = []

    def reply(question: bytes) -> bytes | None:
        asked.append(question)
        return None if question == b"nonsense" else question.upper()

    while len(asked) < frames and questions.socket.poll(5000):
        questions.answer(reply)
    return asked


def test_a_question_is_answered_and_nonsense_is_not(pair: tuple[Questions, Socket]) -> None:
    questions, asker = pair
    asker.send(b"nonsense")
    asker.send(b"who")
    assert answer(questions, 2) == [b"nonsense", b"who"]
    assert asker.poll(5000)
    assert asker.recv() == b"WHO"
    assert not asker.poll(50)


def test_an_asker_that_is_gone_troubles_nobody(pair: tuple[Questions, Socket]) -> None:
    questions, asker = pair
    asker.send(b"who")
    assert questions.socket.poll(5000)
    asker.close(linger=0)
    assert answer(questions, 1) == [b"who"]


def test_engines_have_their_turn_between_many_questions(pair: tuple[Questions, Socket]) -> None:
    questions, asker = pair
    for _ in range(3 * MOST_AT_ONCE):
        asker.send(b"who")
    rounds: list[int] = []
    while sum(rounds) < 3 * MOST_AT_ONCE and questions.socket.poll(5000):
        rounds.append(0)

        def reply(question: bytes) -> bytes:
            rounds[-1] += 1
            return question

        questions.answer(reply)
    assert sum(rounds) == 3 * MOST_AT_ONCE
    assert max(rounds) <= MOST_AT_ONCE
