"""Checks the private names FASER touches in a vLLM: `python -m faser.engine_adapter.patches.compatibility [TREE or
WHEEL]`.

Reads source text only: the tree needs neither dependencies nor a GPU and is never imported. Without an argument it
reads the installed vLLM. For developers and for the release check of a new vLLM; nothing at run time calls it.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .names import SCHEDULER_NAMES, WORKER_ATTRIBUTES, WORKER_NAMES
from .names_graphs import GRAPH_ATTRIBUTES, GRAPH_NAMES
from .names_v2 import V2_ATTRIBUTES, V2_NAMES
from .pipeline.names import PIPELINE_ATTRIBUTES, PIPELINE_NAMES

_SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
_OUTPUT: Final = "vllm.v1.core.sched.output"
_REQUEST: Final = "vllm.v1.request"

# What the scheduler mixin reads or writes without overriding it: (module, class, attribute).
SCHEDULER_ATTRIBUTES: Final = (
    *((_SCHEDULER, "Scheduler", name) for name in ("requests", "dynamic_sd_lookup", "max_num_running_reqs")),
    *((_SCHEDULER, "Scheduler", name) for name in ("get_request_counts", "get_kv_cache_usage", "shutdown")),
    *((_SCHEDULER, "Scheduler", name) for name in ("schedule", "update_from_output", "update_draft_token_ids")),
    *((_OUTPUT, "SchedulerOutput", name) for name in ("num_scheduled_tokens", "scheduled_spec_decode_tokens")),
    (_OUTPUT, "SchedulerOutput", "num_spec_tokens_to_schedule"),
    *((_REQUEST, "Request", name) for name in ("request_id", "status", "spec_token_ids", "num_computed_tokens")),
    *((_REQUEST, "Request", name) for name in ("max_tokens", "priority", "is_prefill_chunk", "num_prompt_tokens")),
    (_REQUEST, "Request", "num_output_tokens"),
    *((_SCHEDULER, "Scheduler", name) for name in ("running", "current_step")),  # ping-pong groups, as the next one
    (_REQUEST, "Request", "next_decode_eligible_step"),
    *(("vllm.v1.outputs", "DraftTokenIds", name) for name in ("req_ids", "draft_token_ids")),
    *(("vllm.v1.outputs", "ModelRunnerOutput", name) for name in ("req_ids", "req_id_to_index", "sampled_token_ids")),
)


@dataclass(frozen=True, slots=True)
class Name:
    """One name FASER relies on; `parameters` is None for what is not a function, `owner` "" for a module's own."""

    module: str
    owner: str
    attribute: str
    parameters: tuple[str, ...] | None

    def __str__(self) -> str:
        return ".".join(part for part in (self.module.removeprefix("vllm."), self.owner, self.attribute) if part)


@dataclass(frozen=True, slots=True)
class NameFinding:
    """What a tree has under a name; `problem` is empty if FASER can use it as it is."""

    name: Name
    problem: str = ""
    remark: str = ""


def touched_names() -> list[Name]:
    """Return every private name of vLLM that FASER overrides, calls, reads or writes."""
    functions = [Name(module, owner or "", attribute, given) for module, owner, attribute, given in _functions()]
    plain = (*SCHEDULER_ATTRIBUTES, *WORKER_ATTRIBUTES, *V2_ATTRIBUTES, *GRAPH_ATTRIBUTES, *PIPELINE_ATTRIBUTES)
    return functions + [Name(module, owner, attribute, None) for module, owner, attribute in plain]


def _functions() -> Iterator[tuple[str, str | None, str, tuple[str, ...] | None]]:
    yield from SCHEDULER_NAMES
    yield from WORKER_NAMES
    yield from V2_NAMES
    yield from GRAPH_NAMES
    yield from PIPELINE_NAMES


class Tree:
    """A vLLM source tree: a folder that holds `vllm/`, the folder `vllm/` itself, or a wheel."""

    def __init__(self, path: Path) -> None:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise ValueError(f"{path}: not a wheel; give a wheel or a folder that holds vllm/__init__.py")
        root: Path | zipfile.Path = zipfile.Path(path) if path.is_file() else path
        self._root = root if (root / "vllm" / "__init__.py").is_file() else path.parent
        if not (self._root / "vllm" / "__init__.py").is_file():
            raise ValueError(f"{path}: no vllm/__init__.py in it; give a wheel or a folder that holds vllm/")
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module, None if there is no such file."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> ast.Module | None:
        stem = name.replace(".", "/")
        for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
            file = self._root / candidate
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def class_named(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Return (module that defines it, definition) of a class that `module` defines or imports."""
        body = self.module(module)
        if body is None:
            return None
        for node in ast.walk(body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.module.startswith("vllm"):
                        return self.class_named(node.module, alias.name)
        return None

    def lineage(self, module: str, name: str) -> Iterator[ast.ClassDef]:
        """Yield a class and its bases, as far as they lie in the tree."""
        found = self.class_named(module, name)
        if found is None:
            return
        home, definition = found
        yield definition
        for base in definition.bases:
            if isinstance(base, ast.Name) and base.id != name:
                yield from self.lineage(home, base.id)


def check(tree: Tree, names: Iterable[Name]) -> list[NameFinding]:
    """Look every name up in the tree."""
    return [_look_up(tree, name) for name in names]


def _look_up(tree: Tree, name: Name) -> NameFinding:
    body = tree.module(name.module)
    if body is None:
        return NameFinding(name, "module is gone")
    if not name.owner:
        scopes: Sequence[ast.AST] = [body]
    elif not (scopes := list(tree.lineage(name.module, name.owner))):
        return NameFinding(name, f"class {name.owner} is gone")
    for scope in scopes:
        for node in _definitions(scope, name.attribute):
            return _compare(name, node, is_method=bool(name.owner))
    return NameFinding(name, "gone")


def _definitions(scope: ast.AST, attribute: str) -> Iterator[ast.AST]:
    """Yield what defines a name in a module or class: a def, an import, an assignment, or `self.name = ...`."""
    inside: list[ast.AST] = list(ast.iter_child_nodes(scope))
    yield from (node for node in inside if _defines(node, lambda found: found == attribute))
    if isinstance(scope, ast.ClassDef):
        yield from (n for n in ast.walk(scope) if _defines(n, lambda found: found == f"self.{attribute}"))


def _defines(node: ast.AST, matches: Callable[[str], bool]) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return matches(node.name)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return any(matches(alias.asname or alias.name) for alias in node.names)
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        return matches(ast.unparse(node.target))
    if isinstance(node, ast.Assign):
        return any(matches(ast.unparse(part)) for target in node.targets for part in _parts(target))
    return False


def _parts(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, (ast.Tuple, ast.List)) else [target]


def _compare(name: Name, node: ast.AST, is_method: bool) -> NameFinding:
    if name.parameters is None:
        return NameFinding(name)
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return NameFinding(name, "no longer a function")
    seen, optional = _parameters(node)
    if is_method and seen[:1] in (["self"], ["cls"]):
        seen = seen[1:]
    expected = list(name.parameters)
    if seen == expected:
        return NameFinding(name)
    added = [parameter for parameter in seen if parameter not in expected]
    if [parameter for parameter in seen if parameter in expected] == expected and set(added) <= optional:
        return NameFinding(name, remark="also takes " + ", ".join(added))
    return NameFinding(name, f"takes ({', '.join(seen)}), expected ({', '.join(expected)})")


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[list[str], set[str]]:
    """Return all parameter names and those that a caller may leave out."""
    given = node.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    optional = set(positional[len(positional) - len(given.defaults) :])
    keyword = [argument.arg for argument in given.kwonlyargs]
    optional |= {name for name, default in zip(keyword, given.kw_defaults, strict=True) if default is not None}
    collected = [argument.arg for argument in (given.vararg, given.kwarg) if argument is not None]
    return positional + keyword + collected, optional | set(collected)


def report(findings: Sequence[NameFinding]) -> str:
    """Return the findings as a table, problems last, with a line of totals."""
    width = max(len(str(finding.name)) for finding in findings)
    ordered = sorted(findings, key=lambda finding: bool(finding.problem))
    lines = [f"{finding.name!s:<{width}}  {finding.problem or finding.remark or 'same'}" for finding in ordered]
    problems = sum(bool(finding.problem) for finding in findings)
    return "\n".join([*lines, f"{len(findings)} names, {problems} problems"])


def installed() -> Path:
    """Return where the installed vLLM's package lies, without importing it."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("vLLM is not installed; give the path of a vLLM wheel or source tree")
    return Path(next(iter(spec.submodule_search_locations))).parent


def main(arguments: Sequence[str]) -> int:
    """Print the table for one tree; 0 if FASER can use every name, 1 if not, 2 for a path that is no vLLM."""
    try:
        path = Path(arguments[0]) if arguments else installed()
        findings = check(Tree(path), touched_names())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{path}\n{report(findings)}\n")
    return 1 if any(finding.problem for finding in findings) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
