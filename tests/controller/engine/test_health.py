"""How a server is, by its /health: who answers otherwise than 200, or nobody, is dead; who is late may be busy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from faser.controller.engine.launch import free_port
from faser.controller.engine.running import health, is_healthy


@pytest.fixture(params=[200, 503])
def answering(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    """Return a server's status and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(request.param)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield request.param, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_vllm_answers_503_once_its_engine_is_dead(answering: tuple[int, str]) -> None:
    status, url = answering
    assert health(url) == ("ready" if status == 200 else "dead")
    assert is_healthy(url) == (status == 200)


def test_where_nobody_listens_any_more_the_server_is_dead() -> None:
    assert health(f"http://127.0.0.1:{free_port()}") == "dead"


def test_who_does_not_answer_in_time_may_be_busy() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert health(f"http://127.0.0.1:{listener.getsockname()[1]}") == "silent"
