"""`faser fleet MODEL [vllm options]`: replicas on Ray behind one address, in the foreground, ended together.

Called by the CLI. Order of start: what can be refused, Ray, the sidecar, the entry point, the first engines.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from ...engine_adapter.settings import default_endpoint
from ...models.embedded.pair import ensure_embedded_pair
from ..config import Config
from ..decision.session import check_policy
from ..engine.launch import FILES, available_cores, is_cpu_build, require_free_port, require_supported_vllm
from ..engine.processes import ProcessTree, deferred_interrupts
from ..engine.serve import BFLOAT16_SLOW, EMBEDDED, is_slow, model_launch
from ..engine.sidecar_child import start_sidecar
from ..extras import require_extra
from ..progress import progress_bar
from ..ray_cluster import RayCluster
from .carrier import Carrier
from .engine_actor import EngineOrder
from .fleet import Fleet
from .front import Front
from .options import FleetOptions, cores_each, require_ours, size_rule
from .placement import Placement, place, replicas_in, require_room
from .ray_carrier import RayCarrier, room
from .sizing import SizeRule

_PASSED_ON: Final = ("FASER_", "VLLM_", "HF_", "OMP_", "KMP_", "NUMBA_", "NCCL_")
_OF_A_NODE: Final = ("FASER_RUNTIME_DIR", "FASER_CACHE", "HF_HOME", "VLLM_CACHE_ROOT")  # places on its disk
_POLL_S: Final = 0.5


def run_fleet(options: FleetOptions, config: Config) -> int:
    """Serve until Ctrl-C; return the exit code."""
    console = Console(stderr=True)
    rule = size_rule(options)
    require_ours(options.arguments)
    require_extra("fleet", "ray")
    check_policy(config.policy.spec)
    require_supported_vllm()
    require_free_port(options.port, options.host)
    is_cpu = is_cpu_build()
    cores = cores_each(options, rule.most, available_cores(), is_cpu)
    placement = place(options.arguments, is_cpu, cores)
    if options.address is None and is_cpu:
        require_room(available_cores() // cores, rule.most, placement.needs(is_cpu))
    _require_model(options, console)
    with ExitStack() as stack:
        os.environ.setdefault("RAY_worker_niceness", "0")  # else engines would run at 15, behind everybody
        cluster = stack.enter_context(RayCluster(options.address, available_cores()))
        _require_room(cluster, placement, rule, is_cpu, console)
        sidecar = _sidecar(config, cluster, stack, console)
        carrier = RayCarrier(cluster, _order(options, config, placement, cluster.is_ours, is_cpu), placement)
        return asyncio.run(_serve(options, rule, carrier, sidecar, console))


def _require_model(options: FleetOptions, console: Console) -> None:
    """Raise what would keep every engine from starting; convert the embedded pair once, before they all would."""
    if options.model == EMBEDDED:
        with progress_bar(console) as show:
            ensure_embedded_pair(show)
    elif is_slow(model_launch(options.model, "", options.arguments)):
        _say(console, BFLOAT16_SLOW)


def _require_room(cluster: RayCluster, placement: Placement, rule: SizeRule, is_cpu: bool, console: Console) -> None:
    found = replicas_in(room(cluster), placement, is_cpu)
    if cluster.is_ours:
        require_room(found, rule.most, placement.needs(is_cpu))
    elif found < rule.most:  # a cluster may grow: its autoscaler looks at what waits
        _say(console, f"this cluster has room for {found} of {rule.most} replicas; others wait until it grows")


def _sidecar(config: Config, cluster: RayCluster, stack: ExitStack, console: Console) -> ProcessTree | None:
    """Start the sidecar of a fleet on this machine, unless one is there; on a cluster every node has its own."""
    endpoint = config.link.endpoint or default_endpoint()
    if not cluster.is_ours:
        _say(console, f"engines look for a sidecar at {endpoint} on their nodes; where none is, their default holds")
        return None
    with deferred_interrupts():
        sidecar = start_sidecar(config)
        if sidecar is None:
            _say(console, f"a sidecar already runs at {endpoint}; using it")
        else:
            stack.enter_context(sidecar)
    return sidecar


def _order(options: FleetOptions, config: Config, placement: Placement, is_here: bool, is_cpu: bool) -> EngineOrder:
    """Return what every engine is started with; paths are made absolute, since actors run elsewhere."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    if not is_here:
        environment = {name: value for name, value in environment.items() if name not in _OF_A_NODE}
    for name in FILES:
        if (path := environment.get(name)) and Path(path).exists():
            environment[name] = str(Path(path).absolute())
    folder = Path(options.model).expanduser()
    model = str(folder.absolute()) if options.model != EMBEDDED and folder.is_dir() else options.model
    return EngineOrder(
        name=f"fleet-{options.port}", model=model, arguments=[*options.arguments, *placement.arguments],
        endpoint=config.link.endpoint, host="127.0.0.1" if is_here else "", cores=placement.cores if is_cpu else 0,
        is_spread=placement.is_spread, environment=environment,
    )  # fmt: skip


async def _serve(
    options: FleetOptions, rule: SizeRule, carrier: Carrier, sidecar: ProcessTree | None, console: Console
) -> int:
    """Run fleet and entry point until a signal or until the first engine did not start."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):  # Ray has a handler of its own until here
        loop.add_signal_handler(number, _end, stopped, code)
    fleet = Fleet(carrier, rule, lambda line: _say(console, line))
    front = Front(fleet)
    tasks: list[asyncio.Task[None]] = []
    try:
        await front.open(options.host, options.port)
        _say(console, f"entry point at http://{_shown(options.host)}:{options.port}/v1, state at /fleet; Ctrl-C stops")
        tasks += [asyncio.create_task(fleet.run()), asyncio.create_task(_watch(sidecar, console))]
        awaited: list[asyncio.Future[Any]] = [stopped, tasks[0]]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            _say(console, "stopping")
            return stopped.result()
        assert fleet.failure is not None
        raise fleet.failure
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await front.close()
        await fleet.close()


def _end(stopped: asyncio.Future[int], code: int) -> None:
    if not stopped.done():
        stopped.set_result(code)


async def _watch(sidecar: ProcessTree | None, console: Console) -> None:
    """Say once that the sidecar is gone: the engines go on."""
    while sidecar is not None:
        if (code := sidecar.poll()) is not None:
            _say(
                console, f"the sidecar ended with code {code}; the engines go on with their default lengths; "
                f"start one with: faser sidecar (log: {sidecar.log})",
            )  # fmt: skip
            return
        await asyncio.sleep(_POLL_S)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _say(console: Console, line: str) -> None:
    console.print(f"faser: {line}", highlight=False, soft_wrap=True, markup=False)
