"""The floor plan: rooms of at most fifteen modules, no circle, no arrow upward, one meaning for a class name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import faser

ROOT = Path(faser.__file__).parent
FLOORS = ("engine_adapter", "env", "models", "controller")  # from the ground up
MOST_MODULES = 15
DOORS = (  # what operators and vLLM name: these never move
    "engine_adapter/scheduler.py",
    "engine_adapter/worker.py",
    "engine_adapter/plugin.py",
    "env/speculative_serving.py",
    "controller/__main__.py",
)

Graph = dict[str, set[str]]


def modules() -> list[Path]:
    return [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path, source: str) -> Iterator[Path]:
    """Yield the modules that a file imports relatively, wherever in the file, unless for type checkers only."""
    for node in _run(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for alias in node.names:
            found = (base / f"{alias.name}.py", base.with_suffix(".py"), base / "__init__.py")
            yield next(target for target in found if target.exists())


def _run(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs: the bodies of `if TYPE_CHECKING` do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _run(node)


def room_of(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def files() -> Graph:
    """Return which file imports which."""
    return {
        name_of(path): set(map(name_of, imports_of(path, path.read_text()))) - {name_of(path)} for path in modules()
    }


def rooms(graph: Graph) -> Graph:
    """Return which folder imports from which; a floor's own files are a room each."""

    def room(name: str) -> str:
        folder, _, _ = name.rpartition("/")
        return name if folder in FLOORS else folder

    found: Graph = defaultdict(set)
    for name, targets in graph.items():
        found[room(name)] |= {room(target) for target in targets} - {room(name)}
    return dict(found)


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected parts of more than one node (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def upward(graph: Graph) -> list[str]:
    def floor(name: str) -> int:
        return FLOORS.index(name.split("/")[0]) if "/" in name else -1  # the root says its version only

    arrows = ((name, target) for name, targets in graph.items() for target in targets)
    return [f"{name} -> {target}" for name, target in arrows if floor(target) > floor(name)]


def crowded(paths: Iterable[Path]) -> dict[str, int]:
    """Return the folders with too many modules, and how many."""
    counts: dict[str, int] = defaultdict(int)
    for path in paths:
        counts[room_of(path)] += path.name != "__init__.py"
    return {room: count for room, count in counts.items() if count > MOST_MODULES}


def doubled_classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the class names that more than one file defines, and where; one class is one meaning."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    return {name: found for name, found in homes.items() if len(found) > 1}


def test_no_file_imports_in_a_circle() -> None:
    assert circles(files()) == []


def test_no_room_imports_in_a_circle() -> None:
    assert circles(rooms(files())) == []


def test_no_arrow_runs_upward() -> None:
    assert upward(files()) == []


def test_no_room_is_crowded() -> None:
    assert crowded(modules()) == {}


def test_a_class_name_has_one_meaning() -> None:
    assert doubled_classes({name_of(path): path.read_text() for path in modules()}) == {}


@pytest.mark.parametrize("door", DOORS)
def test_the_doors_stay_where_they_are(door: str) -> None:
    assert (ROOT / door).is_file()


def test_what_these_tests_look_for_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []
    assert upward({"env/x.py": {"models/y.py"}, "models/y.py": {"env/x.py"}}) == ["env/x.py -> models/y.py"]
    assert crowded([ROOT / "env" / f"m{number}.py" for number in range(16)]) == {"env": 16}
    assert doubled_classes({"a": "class X: ...", "b": "class X: ..."}) == {"X": ["a", "b"]}
    assert len(files()) > 200
    assert any("env/" in target for target in files()["controller/decision/decide.py"])
