"""One request on its way to a replica, and the answer on its way back, unchanged.

Until the first byte of an answer has gone to the client, a replica that is lost costs nothing but time: the request is
made again on another one. Afterwards it cannot be, since the client has tokens of an answer that another replica need
not continue: the stream ends with one event that says so. A client that leaves takes its request off the replica,
because the connection to it is closed with the client's.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, TypeVar

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from .fleet import Fleet, NoReplicaError
from .place import Place

T = TypeVar("T")
MOST_TRIES: Final = 2  # a request that ended two engines is not given a third
EVENTS: Final = "text/event-stream"
_ERROR_EVENT: Final = b'data: {"error"'
_LAST_EVENT: Final = b"data: [DONE]"
_LARGE_BYTES: Final = 1 << 20
REPLICA_HEADER: Final = "X-Faser-Replica"
# RFC 9110, 7.6.1: they speak of one connection. Lengths are counted again on either side.
_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade", "content-length", "host", "expect"}
)  # fmt: skip
_FAILURES: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)


class ClientGoneError(Exception):
    """The client has left."""


class _NotBegunError(Exception):
    """A replica failed before the client had a byte."""


class _BrokenStreamError(Exception):
    """A replica failed amid a stream; the response has been sent, an event at its end says so, vLLM's or ours."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__()
        self.response = response


@dataclass(slots=True)
class ForwardCounts:
    """What became of requests so far."""

    finished: int = 0  # with a replica's answer, whatever its status
    failed: int = 0  # with an error of ours, or a stream with one of either
    cancelled: int = 0  # the client left
    retried: int = 0  # tries after the first


class Forwarder:
    """Takes requests to replicas."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self.counts = ForwardCounts()
        self._fleet, self._session = fleet, session

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Return a replica's answer, which is sent already if it is a stream; raise ClientGoneError."""
        body = await request.read()
        try:
            response = await self._until_answered(request, body)
        except NoReplicaError as error:
            self.counts.failed += 1
            return problem(503, str(error))
        except _BrokenStreamError as broken:
            self.counts.failed += 1
            return broken.response
        except (asyncio.CancelledError, ClientGoneError):
            self.counts.cancelled += 1
            raise
        return response

    async def _until_answered(self, request: web.Request, body: bytes) -> web.StreamResponse:
        tried: list[str] = []
        while True:
            place = await self._fleet.take(len(body), tried)
            try:
                response = await self._try(request, body, place)
            except _NotBegunError as error:
                tried.append(place.name)
                await self._fleet.is_lost(place)  # then it gets nothing more, and a successor is waited for
                if len(tried) == MOST_TRIES:
                    self.counts.failed += 1
                    names = " and ".join(dict.fromkeys(tried))
                    return problem(502, f"{names} failed: {error}; expected an answer; see /fleet")
                self.counts.retried += 1
            else:
                self.counts.finished += 1
                return response
            finally:
                self._fleet.give_back(place)

    async def _try(self, request: web.Request, body: bytes, place: Place) -> web.StreamResponse:
        asking = self._session.request(
            request.method, URL(place.url + request.path_qs, encoded=True), data=_payload(body),
            headers=_passed(request.headers), allow_redirects=False,
        )  # fmt: skip
        upstream = await _before_begun(place, asking)
        async with upstream:
            if upstream.content_type == EVENTS:
                return await self._stream(request, upstream, place)
            return await self._whole(upstream, place)

    async def _whole(self, upstream: aiohttp.ClientResponse, place: Place) -> web.Response:
        """Return an answer that comes in one piece; nothing of it is sent before all of it is there."""
        body = await _before_begun(place, upstream.read())
        if upstream.status >= 500 and await self._fleet.is_lost(place):
            raise _NotBegunError(f"status {upstream.status}")
        return web.Response(status=upstream.status, body=body, headers=_answered(upstream.headers, place))

    async def _stream(self, request: web.Request, upstream: aiohttp.ClientResponse, place: Place) -> web.StreamResponse:
        """Pass events on as they come. vLLM sends its headers before it has a token, so the first event decides."""
        part = await _before_begun(place, upstream.content.readany())
        if (not part or part.startswith(_ERROR_EVENT)) and await self._fleet.is_lost(place):
            raise _NotBegunError("its engine died")
        response = web.StreamResponse(status=upstream.status, headers=_answered(upstream.headers, place))
        await _to_client(response.prepare(request))
        has_failed = False
        while part:
            await _to_client(response.write(part))
            has_failed = has_failed or _ERROR_EVENT in part
            has_ended = part.rstrip().endswith(_LAST_EVENT)
            try:
                part = await place.wait(upstream.content.readany())
            except _FAILURES as error:
                if has_ended:
                    break
                text = f"{place.name} was lost while it answered: {_said(error)}; send the request again"
                # An event may have been cut off: an empty line ends it.
                await _to_client(response.write(b"\n\ndata: " + problem_bytes(502, text) + b"\n\n"))
                await _to_client(response.write_eof())
                raise _BrokenStreamError(response) from None
        await _to_client(response.write_eof())
        if has_failed:
            raise _BrokenStreamError(response)
        return response


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """Return a body as aiohttp wants it: large ones are sent piece by piece, so that nobody else waits."""
    return (io.BytesIO(body) if len(body) > _LARGE_BYTES else body) or None


async def _before_begun(place: Place, reading: Awaitable[T]) -> T:
    try:
        return await place.wait(reading)
    except _FAILURES as error:
        raise _NotBegunError(_said(error)) from None


async def _to_client(sending: Awaitable[object]) -> None:
    try:
        await sending
    except ConnectionError:
        raise ClientGoneError from None


def problem(status: int, text: str) -> web.Response:
    """Return an error in the form that vLLM and OpenAI give theirs."""
    headers = {"Retry-After": "5"} if status == 503 else None
    body = problem_bytes(status, text)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def problem_bytes(status: int, text: str) -> bytes:
    """Return the same as JSON."""
    return json.dumps({"error": {"message": text, "type": "FleetError", "param": None, "code": status}}).encode()


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _passed(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers that speak of the message, not of the connection."""
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP | named)


def _answered(headers: CIMultiDictProxy[str], place: Place) -> CIMultiDict[str]:
    found = _passed(headers)
    found[REPLICA_HEADER] = place.name
    return found
