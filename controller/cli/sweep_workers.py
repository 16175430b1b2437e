"""Where the runs of a sweep are made: on processes of this machine, or as Ray tasks.

Called by controller/cli/training.py. Either way each run has a process of its own with one thread for its arithmetic,
outcomes come as runs end, and closing the iterator ends what still runs. Ray is imported only when it is asked for
(controller/ray_cluster.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import Any

from ...models.evaluation.evaluate import Decide
from ...models.training.sweep import Outcome, TrainingRun, failed, make
from ..errors import UsageError
from ..ray_cluster import RayCluster
from .evaluate import end_with_parent, one_thread


def on_processes(runs: Sequence[TrainingRun], workers: int, decide: Decide, commit: str) -> Iterator[Outcome]:
    """Make the runs on this machine, so many at a time."""
    one_thread()
    others = set(active_children())
    with ThreadPoolExecutor(workers) as threads:
        futures = [threads.submit(_alone, run, decide, commit) for run in runs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):  # a thread may be about to start one more
                for child in set(active_children()) - others:
                    child.terminate()
                time.sleep(0.05)


def _alone(run: TrainingRun, decide: Decide, commit: str) -> Outcome:
    """Make a run in a process of its own: one that is killed takes no other with it."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin) as process:
            return process.submit(make, run, decide, commit).result()
    except Exception as error:
        return failed(run, error)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to every process; the parent sees to it
    end_with_parent()


def on_ray(
    runs: Sequence[TrainingRun], workers: int, address: str | None, decide: Decide, commit: str
) -> Iterator[Outcome]:
    """Make the runs as Ray tasks of one CPU each: on a local instance of so many, or on the cluster at an address."""
    one_thread()
    try:
        cluster = RayCluster(address, workers)
    except ImportError:
        raise UsageError("no ray here", "the extra sweep", "pip install 'faser-vllm[train,sweep]'") from None
    with cluster:  # its end ends this sweep's tasks
        ray = cluster.ray
        task = ray.remote(num_cpus=1, max_calls=1, max_retries=0)(make)
        waiting = {task.remote(run, decide, commit): run for run in runs}
        while waiting:
            for done in ray.wait(list(waiting))[0]:
                yield _outcome(ray, done, waiting.pop(done))


def _outcome(ray: Any, reference: Any, run: TrainingRun) -> Outcome:
    try:
        outcome: Outcome = ray.get(reference)
    except Exception as error:  # a killed worker, a node that is gone, a package that is not there
        return failed(run, error)
    if outcome.trained is not None and not outcome.trained.manifest.exists():
        return failed(run, FileNotFoundError(f"{run.folder} is not here; expected a folder that all nodes share"))
    return outcome
