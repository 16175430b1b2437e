"""`faser fleet` as a process of its own, and a client of it: for replicas.py and for the fleet's test with engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.request import ProxyHandler, build_opener

import aiohttp

from faser.controller.config import LinkConfig
from faser.controller.engine.launch import free_port
from faser.controller.engine.reaper import descendants
from faser.models.embedded.pair import TARGET_NAME

COMMAND: Final = (sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()", "fleet")
POLL_S: Final = 0.2
_DIRECTLY: Final = build_opener(ProxyHandler({}))


def get(url: str) -> bytes:
    """Return what an address answers, by no proxy."""
    with _DIRECTLY.open(url, timeout=10.0) as response:
        content: bytes = response.read()
        return content


class FleetProcess:
    """A fleet of the embedded model on this machine, from construction to `stop`. Use it as a context.

    :param folder: private and short enough for sockets; everything of the fleet lies in it
    """

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        folder.chmod(0o700)
        self.folder, self.log = folder, folder / "fleet.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.link = LinkConfig(endpoint=f"ipc://{folder / 'engine.sock'}")
        base = {name: value for name, value in os.environ.items() if not name.startswith("FASER_")}
        environment = base | {
            "FASER_RUNTIME_DIR": str(folder), "FASER_STORE": str(folder / "t.sqlite"),
            "FASER_MODE_STATE": str(folder / "modes.json"), "XDG_CONFIG_HOME": str(folder),
        }  # fmt: skip
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*COMMAND, "embedded", "--port", str(self.port), *options],
                env=environment, cwd="/", stderr=output, start_new_session=True,
            )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Return what /fleet says."""
        found: dict[str, Any] = json.loads(get(f"{self.url}/fleet"))
        return found

    def replicas(self, state: str = "serving") -> list[dict[str, Any]]:
        """Return the replicas in a state, in the order in which they were asked for; none before the fleet answers."""
        with contextlib.suppress(OSError):
            return [each for each in self.status()["replicas"] if each["state"] == state]
        return []

    def wait_until(self, probe: Callable[[], object], limit_s: float, what: str) -> float:
        """Return the seconds until something is true; raise TimeoutError with the log's end if it never is."""
        begun_s = time.monotonic()
        while not probe():
            if self._process.poll() is not None or time.monotonic() - begun_s > limit_s:
                raise TimeoutError(f"not within {limit_s:g} s: {what}\n{self.log.read_text()[-3000:]}")
            time.sleep(POLL_S)
        return time.monotonic() - begun_s

    def wait_serving(self, count: int, limit_s: float = 280.0) -> float:
        """Return the seconds until so many replicas serve."""
        return self.wait_until(lambda: len(self.replicas()) == count, limit_s, f"{count} replicas serve")

    def core_of(self, replica: dict[str, Any]) -> int:
        """Return the process id of a replica's engine core, whose end ends the engine."""
        names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in descendants(replica["pid"])}
        return next(pid for pid, name in names.items() if name.startswith("VLLM::EngineCor"))

    def left(self) -> list[str]:
        """Return the command lines of what the fleet has started and that still runs."""
        found = []
        mark = f"FASER_RUNTIME_DIR={self.folder}\0".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(path.name) != os.getpid() and mark in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120])
        return found

    def signal(self, number: int) -> int:
        """Send a signal to the command and its group, as a terminal does; return the exit code."""
        os.killpg(self._process.pid, number)
        return self._process.wait(90.0)

    def stop(self) -> int:
        """End everything; return the command's exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        return self._process.wait(90.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a client got."""

    text: str
    replica: str
    error: str  # empty: none
    events: int
    seconds: float

    @property
    def has_begun(self) -> bool:
        """Return whether anything of an answer came."""
        return self.events > 0


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> Streamed:
    """Return a greedy answer of so many tokens, streamed."""
    body = {"model": TARGET_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
            "stream": True}  # fmt: skip
    begun_s, text, events, error, replica = time.perf_counter(), "", 0, "", ""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            replica = response.headers.get("X-Faser-Replica", "")
            if response.status != 200:
                error = f"status {response.status}: {(await response.text())[:200]}"
            async for line in response.content:
                data = line.strip().removeprefix(b"data: ")
                if not data or data == b"[DONE]" or error:
                    continue
                event = json.loads(data)
                if "error" in event:
                    error = event["error"]["message"]
                else:
                    events += 1
                    text += event["choices"][0]["text"]
    except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as failure:
        error = f"connection: {failure!r}"
    return Streamed(text, replica, error, events, time.perf_counter() - begun_s)
