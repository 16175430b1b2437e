"""The HTTP side: metrics, health, status, the web page and its stream of events, and the mode switch.

Started by the sidecar in a thread of its own. It is one more status client: it asks the daemon over the status socket
and never touches its state, so nothing a browser does can reach the decision path. Off until `http.listen` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from ... import __version__
from ...engine_adapter.protocol import Mode
from ..config import HttpConfig, LinkConfig
from ..errors import ConfigError, EndpointError, FaserError, NotRunningError
from ..link.ask import ask, order
from ..link.status_orders import MAX_BY, Switch
from ..snapshot import Snapshot, encode_snapshot
from .metrics import CONTENT_TYPE, exposition

logger = logging.getLogger(__name__)

ASK_S: Final = 1.0
FRESH_S: Final = 0.1  # readers within this time share one question to the daemon
EVENTS_PER_S: Final = 5.0
MAX_STREAMS: Final = 32
MAX_CONNECTIONS: Final = 2 * MAX_STREAMS  # each takes a file descriptor, which engines and the store need, too
MIN_TOKEN: Final = 16
START_S: Final = 10.0
PAGE: Final = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript"),
               "/page.css": ("page.css", "text/css"), "/icon.svg": ("icon.svg", "image/svg+xml")}  # fmt: skip
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", *PAGE})  # they show nothing of an engine
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Server": f"faser/{__version__}",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SwitchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /mode; engine `*` means every engine, mode null forgets a switch."""

    mode: Mode | None
    engine: str = "*"


@dataclass(frozen=True, slots=True)
class Listener:
    """Where the HTTP side listens and who may ask."""

    host: str
    port: int
    token: str

    @classmethod
    def of(cls, http: HttpConfig) -> Listener:
        """Read the configuration; raise EndpointError for an address others can reach without a token."""
        host, _, port = http.listen.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"http.listen = {http.listen!r}", "HOST:PORT such as 127.0.0.1:9478")
        token = _read_token(Path(http.token_file)) if http.token_file else ""
        if not token and not _is_loopback(host):
            raise EndpointError(
                f"http.listen {http.listen} is off loopback without a token", "127.0.0.1:PORT", "set http.token_file"
            )
        return cls(host, int(port), token)


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
        mode = path.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"http.token_file {path} cannot be read: {error}", "a file with one line") from None
    if mode or len(token) < MIN_TOKEN or not token.isascii() or any(letter.isspace() for letter in token):
        raise ConfigError(
            f"http.token_file {path}", f"{MIN_TOKEN} or more ASCII characters in a file of mode 0600", "make a new one"
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class WebServer:
    """The HTTP side of one sidecar, in a thread from construction to close; raises EndpointError if it cannot listen.

    :param link: where the sidecar answers status questions
    """

    def __init__(self, http: HttpConfig, link: LinkConfig) -> None:
        self._listener, self._link = Listener.of(http), link
        self.port = 0
        self._newest: tuple[float, Snapshot] | None = None
        self._streams = 0
        self._has_failed = False
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._error: OSError | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="faser-http", daemon=True)
        self._thread.start()
        self._is_up.wait(START_S)
        if self._error is not None:
            self._thread.join()
            raise EndpointError(
                f"http.listen {http.listen}: {self._error.strerror}", "a free address", "set http.listen"
            )

    def close(self) -> None:
        """End every stream and the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5.0)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._is_up.set()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        application = web.Application(middlewares=[self._guard], client_max_size=4096)
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/status", self._status)
        application.router.add_get("/events", self._events)
        application.router.add_post("/mode", self._mode)
        for path in PAGE:
            application.router.add_get(path, self._page)
        # What it would log is a traceback for each request that is none: anybody could fill the log.
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, logger=_silent())
        await runner.setup()
        assert runner.server is not None
        accept = partial(_accept, runner.server)
        try:
            host, port = self._listener.host, self._listener.port
            site = await self._loop.create_server(accept, host, port, backlog=MAX_CONNECTIONS, reuse_address=True)
            self.port = site.sockets[0].getsockname()[1]
            self._is_up.set()
            await self._stop.wait()
            site.close()
        except OSError as error:
            self._error = error
        finally:
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse who may not ask, and turn our own errors into JSON."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        try:
            return await handler(request)
        except NotRunningError as error:
            return _problem(503, str(error))
        except FaserError as error:
            return _problem(409, str(error))
        except (web.RequestPayloadError, ConnectionError):
            return _problem(400, "the body cannot be read; expected JSON without a Content-Encoding")
        except web.HTTPException:
            raise  # aiohttp's way to say 404, 405, 413
        except Exception:
            if not self._has_failed:
                logger.exception("an HTTP request failed; of further ones nothing is said")
            self._has_failed = True
            return _problem(500, "a bug: the sidecar's log has its traceback; deciding goes on")

    def _refusal(self, request: web.Request) -> web.Response | None:
        token = self._listener.token
        if not token:
            # A page elsewhere may point a name of its own at this address (DNS rebinding): then Host tells.
            name = request.headers.get("Host", "").rpartition(":")[0] or request.headers.get("Host", "")
            return None if _is_loopback(name.strip("[]")) else _problem(403, "this Host is not served")
        if request.path in OPEN_PATHS:
            return None
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode()):
            return None
        refused = _problem(401, "the token of http.token_file is needed: Authorization: Bearer ...")
        refused.headers["WWW-Authenticate"] = "Bearer"
        return refused

    # -- answers --------------------------------------------------------------------------------------------------

    async def _snapshot(self) -> Snapshot:
        now_s = time.monotonic()
        if self._newest is None or now_s - self._newest[0] > FRESH_S:
            snapshot = await asyncio.to_thread(ask, self._link, ASK_S)
            self._newest = (time.monotonic(), snapshot)
        return self._newest[1]

    async def _healthz(self, request: web.Request) -> web.Response:
        """The daemon's loop goes round."""
        await self._snapshot()
        return _json({"status": "ok"})

    async def _readyz(self, request: web.Request) -> web.Response:
        """Engines can connect; ?engines=1 also demands that one has, ?recording=1 that telemetry is written."""
        snapshot = await self._snapshot()
        present = [engine for engine in snapshot.engines if engine.presence in ("busy", "idle")]
        missing = []
        wanted = request.query.get("engines", "0")
        if not wanted.isdecimal() or len(wanted) > 6:
            return _problem(400, f"engines={wanted!r}; expected a number")
        if len(present) < int(wanted):
            missing.append("engines")
        if request.query.get("recording") and (snapshot.store.error or not snapshot.store.path):
            missing.append("recording")
        body = {"ready": not missing, "missing": missing, "engines": len(present), "store_error": snapshot.store.error}
        return _json(body, 503 if missing else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return _answer(exposition(await self._snapshot()), CONTENT_TYPE)

    async def _status(self, request: web.Request) -> web.Response:
        return _answer(encode_snapshot(await self._snapshot()), "application/json")

    async def _page(self, request: web.Request) -> web.Response:
        name, kind = PAGE[request.path]
        content = resources.files(__package__).joinpath("page", name).read_bytes()
        return _answer(content, f"{kind}; charset=utf-8")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Snapshots as server-sent events, a few per second, however fast the engines step."""
        if self._streams >= MAX_STREAMS:
            return _problem(503, f"{MAX_STREAMS} streams are open already")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._streams += 1
        try:
            while not self._stop.is_set():
                try:
                    line = encode_snapshot(await self._snapshot())
                except NotRunningError as error:
                    line = msgspec.json.encode({"error": str(error)})
                await response.write(b"data: " + line + b"\n\n")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), 1.0 / EVENTS_PER_S)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the reader has left
        finally:
            self._streams -= 1
        return response

    async def _mode(self, request: web.Request) -> web.Response:
        """Switch a mode; only with a token, since any page in a browser can send a POST to loopback."""
        if not self._listener.token:
            return _problem(403, "switching over HTTP needs http.token_file; without it use: faser mode")
        try:
            wanted = msgspec.json.decode(await request.read(), type=SwitchRequest)
        except msgspec.MsgspecError as error:
            return _problem(400, f'{error}; expected {{"mode": "advisory", "engine": "*"}}')
        switch = Switch(wanted.engine, wanted.mode, f"http {request.remote}"[:MAX_BY])
        snapshot = await asyncio.to_thread(order, self._link, switch, ASK_S)
        self._newest = (time.monotonic(), snapshot)
        return _answer(encode_snapshot(snapshot), "application/json")


def _accept(server: web.Server) -> web.RequestHandler:
    """Return who serves a new connection; where there are too many, the oldest make room, so that a probe gets in."""
    for oldest in server.connections[: 1 - MAX_CONNECTIONS]:
        if oldest.transport is not None:
            oldest.transport.abort()
    return server()


def _silent() -> logging.Logger:
    quiet = logging.getLogger("aiohttp.server")
    quiet.setLevel(logging.CRITICAL)
    return quiet


def _answer(content: bytes, kind: str, status: int = 200) -> web.Response:
    return web.Response(body=content, status=status, headers={**HEADERS, "Content-Type": kind})


def _json(content: object, status: int = 200) -> web.Response:
    return _answer(msgspec.json.encode(content), "application/json", status)


def _problem(status: int, message: str) -> web.Response:
    return _json({"error": message}, status)
