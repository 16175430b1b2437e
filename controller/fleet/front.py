"""The entry point: one HTTP address for all replicas, speaking what vLLM's API server speaks.

What asks a model something is passed on unchanged (forwarding.py). What would change one replica and leave the others
as they are is refused, as is what lives on one replica only. Three paths are the fleet's own.
"""

from __future__ import annotations

import logging
from typing import Final

import aiohttp
from aiohttp import web

from ..engine.load_generator import connector
from .fleet import Fleet
from .fleet_metrics import CONTENT_TYPE, exposition
from .forwarding import Forwarder, _ClientGoneError, problem

OWN: Final = ("/health", "/fleet", "/metrics")
PASSED: Final = frozenset(
    {"/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank", "/generative_scoring", "/version",
     "/ping", "/invocations", "/inference/v1/generate", "/cohere/v2/chat", "/v2/embed", "/v2/rerank"}
)  # fmt: skip
REFUSED: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/responses/")
MOST_BODY_BYTES: Final = 64 << 20  # kept until the answer has begun, to be sent again if need be
_SHUTDOWN_S: Final = 5.0


def is_passed(path: str) -> bool:
    """Return whether a path is for a replica, any of them."""
    return path in PASSED or (path.startswith("/v1/") and not path.startswith(REFUSED))


class Front:
    """Serves until closed. To be used in the loop that the fleet runs in."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._session: aiohttp.ClientSession | None = None
        self._forwarder: Forwarder | None = None
        self._runner: web.AppRunner | None = None

    async def open(self, host: str, port: int) -> None:
        """Listen; OSError if the address cannot be had."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        self._session = aiohttp.ClientSession(connector=connector(), timeout=timeout, auto_decompress=False)
        self._forwarder = Forwarder(self._fleet, self._session)
        application = web.Application(client_max_size=MOST_BODY_BYTES)
        application.router.add_get("/health", self._health)
        application.router.add_get("/fleet", self._status)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_route("*", "/{path:.*}", self._pass)
        # handler_cancellation: a client that leaves ends its request here, and with it the one to the replica.
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, logger=_silent()
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=1024).start()

    async def close(self) -> None:
        """End what is under way and listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        assert self._forwarder is not None
        if not is_passed(request.path):
            return problem(
                404,
                f"{request.path} is not for a fleet; expected /v1/... or {', '.join(OWN)}; ask a replica itself, see /fleet",
            )
        try:
            return await self._forwarder.forward(request)
        except web.HTTPRequestEntityTooLarge:
            return problem(413, f"a body beyond {MOST_BODY_BYTES >> 20} MiB; expected less")
        except _ClientGoneError:
            raise ConnectionResetError from None

    async def _health(self, _: web.Request) -> web.Response:
        """200 if a request would be served: somebody serves, or an idle fleet of none would start somebody."""
        is_asleep = self._fleet.rule.least == 0 and self._fleet.failure is None
        return web.Response(status=200 if is_asleep or self._fleet.view().of("serving") else 503)

    async def _status(self, _: web.Request) -> web.Response:
        assert self._forwarder is not None
        return web.json_response(body=status_json(self._fleet, self._forwarder.counts))

    async def _metrics(self, _: web.Request) -> web.Response:
        assert self._forwarder is not None
        text = exposition(self._fleet, self._forwarder.counts)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


def status_json(fleet: Fleet, counts: object) -> bytes:
    """Return replicas, what is in flight and what has happened."""
    import msgspec

    now_s = fleet.view().now_s
    replicas = [
        {"name": each.name, "state": each.state, "for_s": round(now_s - each.since_s, 1), "requests": each.requests,
         "url": each.url, "where": each.where, "pid": each.pid}
        for each in fleet.replicas()
    ]  # fmt: skip
    rule = {"least": fleet.rule.least, "most": fleet.rule.most, "requests_each": fleet.rule.requests_each,
            "idle_s": fleet.rule.idle_s}  # fmt: skip
    told = {
        "replicas": replicas,
        "waiting": fleet.view().waiting,
        "rule": rule,
        "counts": fleet.counts,
        "requests": counts,
    }
    return msgspec.json.encode(told)


def _silent() -> logging.Logger:
    """Return a logger for aiohttp, which would log a traceback for every request that is none."""
    logger = logging.getLogger("faser.fleet.http")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger
