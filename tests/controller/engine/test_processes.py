"""A process tree on its leash: nothing outlives the parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from faser.controller.engine.processes import ProcessTree, _ticks_s, deferred_interrupts, thread_cpu_s
from faser.controller.engine.reaper import descendants

pytestmark = pytest.mark.alone

DEADLINE_S = 20.0
# A server like vLLM: its child leaves the process group, its grandchild is orphaned, each writes its id.
FAMILY = """
import os, signal, subprocess, sys, time
folder, is_stubborn = sys.argv[1], len(sys.argv) > 2
if is_stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = "import os, sys, time; open(sys.argv[1] + '/grandchild', 'w').write(str(os.getpid())); time.sleep(600)"
child = f"import os, subprocess, sys; open(sys.argv[1] + '/child', 'w').write(str(os.getpid()));" \\
        f"subprocess.Popen([sys.executable, '-S', '-c', {grandchild!r}, sys.argv[1]], start_new_session=True)"
subprocess.Popen([sys.executable, "-S", "-c", child, folder], start_new_session=True).wait()
open(folder + "/parent", "w").write(str(os.getpid()))
print("up", flush=True)
time.sleep(600)
"""
NAMES = ("parent", "child", "grandchild")


def eventually(probe: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not probe():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def family(folder: Path) -> list[int]:
    eventually(lambda: all((folder / n).exists() and (folder / n).read_text() for n in NAMES), "the family is up")
    return [int((folder / name).read_text()) for name in NAMES]


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ProcessTree]]:
    trees = []

    def build(*arguments: str, grace_s: float = 5.0) -> ProcessTree:
        command = [sys.executable, "-S", "-c", FAMILY, str(tmp_path), *arguments]
        trees.append(ProcessTree(command, os.environ, tmp_path / "log", grace_s=grace_s))
        return trees[-1]

    yield build
    for tree in trees:
        tree.stop()


def test_stopping_ends_orphans_in_other_process_groups_too(start: Callable[..., ProcessTree], tmp_path: Path) -> None:
    tree = start()
    pids = family(tmp_path)
    assert tree.poll() is None
    assert tree.stop() == 128 + signal.SIGTERM
    assert [pid for pid in pids if lives(pid)] == []
    assert (tmp_path / "log").read_text() == "up\n"


def test_a_command_that_ignores_sigterm_is_killed(start: Callable[..., ProcessTree], tmp_path: Path) -> None:
    tree = start("stubborn", grace_s=0.2)
    pids = family(tmp_path)
    assert tree.stop() == 128 + signal.SIGKILL
    assert [pid for pid in pids if lives(pid)] == []


def test_stopping_twice_is_allowed(start: Callable[..., ProcessTree], tmp_path: Path) -> None:
    tree = start()
    family(tmp_path)
    assert tree.stop() == tree.stop()


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    with ProcessTree([sys.executable, "-S", "-c", "raise SystemExit(7)"], os.environ, tmp_path / "log") as tree:
        eventually(lambda: tree.poll() is not None, "the command ends")
        assert tree.poll() == 7


PARENT = """
import os, sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from faser.controller.engine.processes import ProcessTree
tree = ProcessTree([sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]], os.environ, Path(sys.argv[2]) / "log")
print(tree.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_the_parent_dies(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", PARENT, FAMILY, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, cwd="/") as parent:
        assert parent.stdout
        reaper = int(parent.stdout.readline())
        pids = [reaper, *family(tmp_path)]
        parent.send_signal(number)
    eventually(lambda: not any(map(lives, pids)), f"nothing of {pids} lives after {number.name}")


def test_the_command_ends_even_if_its_reaper_is_killed(start: Callable[..., ProcessTree], tmp_path: Path) -> None:
    tree = start()
    parent, _, grandchild = family(tmp_path)
    os.kill(tree.pid, signal.SIGKILL)
    eventually(lambda: not lives(parent), "the command got SIGTERM")
    os.kill(grandchild, signal.SIGKILL)  # nobody is left who knows it


def test_ctrl_c_in_the_terminal_does_not_reach_the_tree(start: Callable[..., ProcessTree], tmp_path: Path) -> None:
    tree = start()
    pids = [tree.pid, *family(tmp_path)]
    assert os.getpgid(0) not in {os.getpgid(pid) for pid in pids if lives(pid)}


def test_descendants_are_found_over_generations(start: Callable[..., ProcessTree], tmp_path: Path) -> None:
    tree = start()
    parent, child, grandchild = family(tmp_path)
    eventually(lambda: not lives(child), "the child has ended")
    assert {parent, grandchild} <= set(descendants(tree.pid))


def test_a_paused_tree_uses_no_time_and_goes_on_or_ends_when_told(tmp_path: Path) -> None:
    spin = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', 'while True: pass']).wait()"
    with ProcessTree([sys.executable, "-S", "-c", spin], dict(os.environ), tmp_path / "log", grace_s=5.0) as tree:
        eventually(lambda: tree.cpu_s() > 0.05, "the child spins")
        tree.pause()
        paused_s = tree.cpu_s()
        time.sleep(0.2)
        assert tree.cpu_s() <= paused_s + 0.02
        tree.resume()
        eventually(lambda: tree.cpu_s() > paused_s + 0.05, "it goes on")
        tree.pause()
        begin = time.monotonic()
        pids = descendants(tree.pid)
    assert time.monotonic() - begin < 4.0, "a paused tree ended only by force"
    assert pids
    assert not any(lives(pid) for pid in pids)


def test_the_cpu_time_of_every_thread_of_a_tree_is_told_apart(tmp_path: Path) -> None:
    idle = (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nwhile True: pass"
    )
    with ProcessTree([sys.executable, "-S", "-c", idle], dict(os.environ), tmp_path / "log", grace_s=5.0) as tree:
        eventually(lambda: tree.cpu_s() > 0.2 and len(tree.thread_cpu_s()) == 2, "one thread spins, one sleeps")
        least_s, spent_s = sorted(tree.thread_cpu_s().values())
        assert least_s < 0.05
        assert spent_s == pytest.approx(tree.cpu_s(), abs=0.1)
        (pid,) = descendants(tree.pid)
        by_ticks_s = _ticks_s(Path(f"/proc/{pid}/task/{pid}"))
        assert by_ticks_s == pytest.approx(thread_cpu_s(pid)[pid], abs=0.1), "where the scheduler keeps no account"
    assert thread_cpu_s(pid) == {}


@pytest.mark.parametrize(("hold", "expected"), [(deferred_interrupts, ["owned"]), (nullcontext, [])])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_what_was_started_has_an_owner(
    number: signal.Signals, hold: Callable[[], AbstractContextManager[None]], expected: list[str]
) -> None:
    steps: list[str] = []

    def start() -> None:
        with hold():
            os.kill(os.getpid(), number)
            time.sleep(0.01)  # Python runs a handler between two instructions, not in os.kill itself
            steps.append("owned")
        steps.append("never reached")

    previous = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        signal.signal(number, previous)
    assert steps == expected
