"""One arm of a benchmark: a vLLM server, for FASER with a sidecar, that can be frozen between two steps.

Called by controller/bench/arms.py and controller/bench/course.py. An arm that is not measured is frozen by vLLM's own
pause, which ends the step in flight and keeps the requests, and is then halted. Halted alone it would stop within a
step, whose time FASER would learn; paused alone its worker keeps half a core busy for some seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self

import aiohttp

from ...models.embedded.pair import EMBEDDED_K_MAX, EmbeddedPair
from ...models.embedded.precision import DType, number_bytes
from ..config import Config, LinkConfig, Value
from ..config_layers import load as load_config
from ..engine.launch import EngineLaunch, embedded_dtype
from ..engine.machine import ROOT
from ..engine.processes import ProcessTree, deferred_interrupts
from ..engine.running import RunningEngine
from ..engine.serve import embedded_launch
from ..engine.sidecar_child import await_introduction, own_sidecar
from ..errors import EngineError, FaserError
from ..link.ask import ask
from .best_table import Table, longest
from .plan import LENGTHS, NGRAM, NGRAM_LONG, NONE, POLICIES, SUFFIX, SUFFIX_OWN, SUFFIXES, TABLE, VARIANTS
from .ratio import OURS

READY_S: Final = 600.0
_INTRODUCTION_S: Final = 30.0
_ANSWER_S: Final = 60.0
_MATCHING: Final[Mapping[str, Mapping[str, object]]] = {
    NGRAM: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    NGRAM_LONG: {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 8, "prompt_lookup_min": 3},
    SUFFIX: {"method": "suffix"},
    SUFFIX_OWN: {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}
_SUFFIX_REMEDY: Final = "run `make suffix`, which builds it, or leave suffix out of --rivals"
LEASE_MS: Final = 600_000  # FASER's lease outlives an arm's wait for its next slice
# What glibc's malloc hands out lies in huge pages, where the system lets it. In small ones engines alike read their
# weights up to 9 % faster or slower than one another for as long as they live, by where these happen to lie; in huge
# ones 2 %.
HUGE_PAGES: Final = ":".join((
    "glibc.malloc.hugetlb=1", f"glibc.malloc.mmap_threshold={1 << 30}", f"glibc.malloc.trim_threshold={1 << 32}",
))  # fmt: skip
HELD_WORKER: Final = "faser.controller.held_answers.engine.HeldWorker"
_ENVIRONMENT: Final = {
    "GLIBC_TUNABLES": HUGE_PAGES,
    "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume and /collective_rpc
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "86400",  # a frozen server must not find its clients too quiet
}
# Each under its own gate in the engine, which measures whether it pays.
_PRUNING: Final = {"FASER_EXIT_HEADS": str(ROOT / "models" / "weights" / "exits.safetensors")}
_OVERLAP: Final = {"FASER_DRAFTER_CORES": "all", "FASER_FRONTIER": str(EMBEDDED_K_MAX), "FASER_PING_PONG": "auto"}
_VARIANT_ENVIRONMENT: Final = dict(zip(VARIANTS, (_PRUNING, _OVERLAP, _PRUNING | _OVERLAP), strict=True))


def server_arguments(dtype: DType, is_extended: bool = False) -> tuple[str, ...]:
    """Return what every server is given; without the prefix cache a prompt that comes back costs the same."""
    cache_bytes = str(number_bytes(dtype) * 384 << 20)
    named = () if dtype == embedded_dtype() else ("--dtype", dtype)
    extension = ("--worker-extension-cls", HELD_WORKER) if is_extended else ()
    return ("--no-enable-prefix-caching", "--kv-cache-memory-bytes", cache_bytes, *named, *extension)


@dataclass(frozen=True, slots=True)
class Drafting:
    """vLLM's counters since its start, and our sidecar's."""

    draft_tokens: int
    accepted_tokens: int
    unverified_tokens: int = 0  # drawn, and not handed to verification


@dataclass(frozen=True, slots=True)
class Bed:
    """Where servers are put: what all of them share."""

    pair: EmbeddedPair
    sockets: Path  # a private folder with a short path
    folder: Path  # of logs and telemetry
    policy: str
    threads: int
    dtype: DType = field(default_factory=embedded_dtype)
    is_held: bool = False  # to recorded answers
    is_sampled: bool = False  # at a temperature above 0

    @property
    def server_gib(self) -> float:
        """Return the memory of a server with 32 requests: at 2.9 seven of them left 24 GiB without a page cache."""
        return 2.8 + 0.45 * number_bytes(self.dtype)

    def config(self, name: str = OURS) -> Config:
        """Return the configuration of an arm's sidecar; a rival's rule is not saved from itself by our guard."""
        flags: dict[str, Value | None] = {
            "link.endpoint": f"ipc://{self.sockets / f'{name}.sock'}",
            "link.status_endpoint": f"ipc://{self.sockets / f'{name}.status'}",
            "policy.spec": name if name in POLICIES else self.policy,
            "store.path": self.folder / f"{name}.sqlite",
            "mode.state": self.folder / f"{name}.modes.json",
            "lease.ms": LEASE_MS,
        }
        if name in POLICIES:
            flags["guard.envelope_margin"] = 1.0
        return load_config(None, os.environ, flags).config

    def launch(self, name: str, table: Table = ()) -> EngineLaunch:
        """Return an arm's server; what is no policy is vLLM without FASER's plugin."""
        arguments = server_arguments(self.dtype, self.is_held or self.is_sampled)
        launch = dataclasses.replace(
            embedded_launch(self.pair, self.config(name).link.endpoint, arguments=arguments),
            threads=self.threads, kv_cache_gib=None, environment_extra=_ENVIRONMENT,
        )  # fmt: skip
        if is_steered(name):
            environment = {**_ENVIRONMENT, "FASER_LEASE_MS": str(LEASE_MS), **_VARIANT_ENVIRONMENT.get(name, {})}
            return dataclasses.replace(launch, environment_extra=environment)
        environment = {**_ENVIRONMENT, "VLLM_PLUGINS": "none"}
        speculative = self.drafting(name, table)
        return dataclasses.replace(launch, has_faser=False, speculative=speculative, environment_extra=environment)

    def drafting(self, name: str, table: Table = ()) -> dict[str, object] | None:
        """Return with what an arm drafts and how long, as vLLM takes it; None: it does not."""
        if is_steered(name):
            return self.pair.speculative()
        if name == NONE:
            return None
        if name in _MATCHING:
            return dict(_MATCHING[name])
        if name == TABLE:
            rows = [list(row) for row in table]
            return {**self.pair.speculative(longest(table)), "num_speculative_tokens_per_batch_size": rows}
        assert name in LENGTHS, name
        return self.pair.speculative(int(name[1:]))


def is_steered(name: str) -> bool:
    """Return whether an arm has a sidecar."""
    return name in (OURS, *POLICIES, *VARIANTS)


def require_available(name: str) -> None:
    """Raise EngineError for a rival that cannot run here: vLLM would say so half a minute later."""
    if name in SUFFIXES and find_spec("arctic_inference") is None:
        seen = f"{name} is not available: arctic_inference is not installed"
        raise EngineError(seen, "the package arctic-inference 0.1.1", _SUFFIX_REMEDY)


@dataclass(slots=True)
class Arm:
    """A server that runs, with its sidecar if it has one."""

    name: str
    engine: RunningEngine
    stack: ExitStack  # ends both
    sidecar: ProcessTree | None = None
    link: LinkConfig | None = None  # of the sidecar
    is_halted: bool = False
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    @classmethod
    def start(cls, name: str, bed: Bed, table: Table = ()) -> Self:
        """Start the server's processes; `wait_ready` says whether they live."""
        require_available(name)
        stack, sidecar, link = ExitStack(), None, None
        with deferred_interrupts():
            if is_steered(name):
                link = bed.config(name).link
                sidecar = stack.enter_context(own_sidecar(bed.config(name), bed.folder / f"{name}.sidecar.log"))
            try:
                engine = stack.enter_context(RunningEngine(bed.launch(name, table), bed.folder / f"{name}.log"))
            except BaseException:
                stack.close()
                raise
        return cls(name, engine, stack, sidecar, link)

    def wait_ready(self, bed: Bed) -> None:
        """Block until the server serves, for FASER until it and the sidecar have met; raise EngineError otherwise."""
        self.engine.wait_ready(READY_S)
        if self.sidecar is not None:
            remedy = f"see {bed.folder}"
            await_introduction(
                bed.config(self.name), self.sidecar, _INTRODUCTION_S, remedy, f"the engine of {self.name}"
            )

    @property
    def url(self) -> str:
        """The server's address."""
        return self.engine.launch.url

    def cpu_s(self) -> float:
        """Return the CPU time used so far, the sidecar's with it."""
        return self.engine.tree.cpu_s() + (self.sidecar.cpu_s() if self.sidecar is not None else 0.0)

    def thread_cpu_s(self) -> dict[int, float]:
        """Return the CPU time that each thread of the server has used so far, by thread id."""
        return self.engine.tree.thread_cpu_s()

    async def freeze(self) -> None:
        """End the step in flight and keep all requests as they are."""
        await self._post("/pause?mode=keep&clear_cache=false")

    async def thaw(self) -> None:
        """Go on where `freeze` stopped."""
        self.wake()
        await self._post("/resume")

    async def mend_sampling(self) -> None:
        """Let drafts be sampled at the temperature that was asked for; FASER's own worker does so by itself."""
        await self._post("/collective_rpc", {"method": "mend_sampling"})

    async def hold(self, path: Path) -> None:
        """Hold all requests from now on to the answers of a file."""
        await self._post("/collective_rpc", {"method": "hold_answers", "args": [str(path.absolute())]})

    def halt(self) -> None:
        """Stop the processes of a frozen or idle server.

        The sidecar stays: it sleeps while its engine does. Halted, its pages were taken back, and it took up to 2.6 s
        of its next turn to fetch them again.
        """
        if not self.is_halted:
            self.engine.tree.pause()
            self.is_halted = True

    def wake(self) -> None:
        """Let the processes run again."""
        if self.is_halted:
            self.engine.tree.resume()
            self.is_halted = False

    async def drafting(self) -> Drafting:
        """Return the counters as they are now."""
        counts = {"draft_tokens": 0, "accepted_tokens": 0}
        async with self._open().get("/metrics") as reply:
            for line in (await reply.text()).splitlines():
                for name in counts:
                    if line.startswith(f"vllm:spec_decode_num_{name}_total"):
                        counts[name] += int(float(line.rsplit(" ", 1)[1]))
        return Drafting(**counts, unverified_tokens=await self._unverified_tokens())

    async def _unverified_tokens(self) -> int:
        if self.link is None:
            return 0
        try:
            snapshot = await asyncio.to_thread(ask, self.link)
        except FaserError as error:
            raise EngineError(f"{self.name}'s sidecar does not answer: {error}") from None
        return sum(engine.unverified_tokens for engine in snapshot.engines)

    async def _post(self, path: str, body: object = None) -> None:
        async with self._open().post(path, json=body) as reply:
            if reply.status != 200:
                raise EngineError(f"{self.name} answered {reply.status} to {path}", "200", f"see {self.engine.log}")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
            self._session = aiohttp.ClientSession(self.url, timeout=timeout)
        return self._session

    async def close(self) -> None:
        """Close our connections; the processes end with the stack."""
        if self._session is not None:
            await self._session.close()

    def end(self) -> None:
        """End the processes."""
        self.stack.close()
