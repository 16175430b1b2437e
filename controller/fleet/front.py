"""The entry point: one HTTP address for all replicas, speaking what vLLM's API server speaks.

What asks a model something is passed on unchanged (forwarding.py). What would change one replica and leave the others
as they are is refused, and so is what lives on one replica only. Three paths are the fleet's own.
"""

from __future__ import annotations

import logging
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from ..engine.load_generator import connector
from .fleet import Fleet
from .fleet_metrics import CONTENT_TYPE, exposition
from .forwarding import ClientGoneError, ForwardCounts, Forwarder, problem

OWN: Final = ("/health", "/fleet", "/metrics")
PASSED: Final = frozenset(
    {"/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/generative_scoring", "/version",
     "/ping", "/invocations", "/inference/v1/generate", "/cohere/v2/chat", "/v2/embed", "/v2/rerank"}
)  # fmt: skip
REFUSED: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/responses/", "/v1/realtime")
MOST_BODY_BYTES: Final = 64 << 20  # kept until the answer has begun, to be sent again if need be
_SHUTDOWN_S: Final = 5.0
_AUTO_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # what the client did not say


def is_passed(path: str) -> bool:
    """Return whether a path is for a replica, any of them."""
    return path in PASSED or (path.startswith("/v1/") and not path.startswith(REFUSED))


class Front:
    """Serves until closed. To be used in the loop that the fleet runs in."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        self._session = aiohttp.ClientSession(
            connector=connector(), timeout=timeout, auto_decompress=False, skip_auto_headers=_AUTO_HEADERS
        )
        self._forwarder = Forwarder(fleet, self._session)
        application = web.Application(client_max_size=MOST_BODY_BYTES)
        application.router.add_get("/health", self._health)
        application.router.add_get("/fleet", self._status)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_route("*", "/{path:.*}", self._pass)
        # handler_cancellation: a client that leaves ends its request here, and with it the one to the replica.
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, logger=_silent()
        )

    async def open(self, host: str, port: int) -> None:
        """Listen; OSError if the address cannot be had."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=1024).start()

    async def close(self) -> None:
        """Listen no more, and end what is under way."""
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if not is_passed(request.path):
            return problem(
                404, f"{request.path} is not for a fleet; expected /v1/... or {', '.join(OWN)}; ask a replica itself"
            )
        try:
            return await self._forwarder.forward(request)
        except web.HTTPRequestEntityTooLarge:
            return problem(413, f"a body of more than {MOST_BODY_BYTES >> 20} MiB; expected less")
        except ClientGoneError:
            raise ConnectionResetError from None

    async def _health(self, _: web.Request) -> web.Response:
        """Answer 200 if a request would be served: somebody serves, or somebody would start."""
        is_asleep = self._fleet.rule.least == 0 and self._fleet.view().may_start
        return web.Response(status=200 if is_asleep or self._fleet.view().of("serving") else 503)

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(body=status(self._fleet, self._forwarder.counts))

    async def _metrics(self, _: web.Request) -> web.Response:
        text = exposition(self._fleet, self._forwarder.counts)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


def status(fleet: Fleet, requests: ForwardCounts) -> bytes:
    """Return replicas, what is in flight and what has happened, as JSON."""
    view = fleet.view()
    replicas = [
        {"name": each.name, "state": each.state, "for_s": round(view.now_s - each.since_s, 1),
         "requests": len(each.places), "url": each.sight.url, "pid": each.sight.pid,
         "where": each.sight.where if each.sight.is_placed else "waits for room"}
        for each in fleet.replicas()
    ]  # fmt: skip
    told = {"replicas": replicas, "waiting": view.waiting, "rule": fleet.rule, "changes": fleet.counts,
            "requests": requests}  # fmt: skip
    return msgspec.json.encode(told)


def _silent() -> logging.Logger:
    """Return a logger for aiohttp, which would log a traceback for every request that is none."""
    logger = logging.getLogger("faser.fleet.http")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger
