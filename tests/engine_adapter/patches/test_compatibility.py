"""The name check finds what changed in a vLLM tree, and finds nothing in the installed one."""

import ast
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from faser.engine_adapter import patches
from faser.engine_adapter.patches.compatibility import (
    Name,
    NameFinding,
    Tree,
    check,
    installed,
    main,
    touched_names,
)
from faser.engine_adapter.patches.pruning import PRUNABLE_DECODERS

SOURCE = """
from vllm.base import Parent as Old

LIMIT = 3


class Child(Old):
    field: int

    def __init__(self):
        self.first, self.second = 1, 2
        self.typed: int = 3

    def run(self, a, b, c=None, *, d=1):
        pass
"""

PARENT = """
class Parent:
    def inherited(self, x):
        self.deep = x
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "child.py").write_text(SOURCE)
    (package / "base.py").write_text(PARENT)
    return Tree(tmp_path)


def only(tree: Tree, owner: str, attribute: str, parameters: tuple[str, ...] | None) -> NameFinding:
    (finding,) = check(tree, [Name("vllm.child", owner, attribute, parameters)])
    return finding


@pytest.mark.parametrize("attribute", ["field", "first", "second", "typed", "run", "inherited", "deep"])
def test_fields_methods_and_inherited_names_are_found(tree: Tree, attribute: str) -> None:
    assert only(tree, "Child", attribute, None).problem == ""


@pytest.mark.parametrize("attribute", ["LIMIT", "Child", "Old"])
def test_a_modules_own_names_are_found(tree: Tree, attribute: str) -> None:
    assert only(tree, "", attribute, None).problem == ""


def test_the_same_parameters_pass_without_remark(tree: Tree) -> None:
    assert only(tree, "Child", "run", ("a", "b", "c", "d")) == NameFinding(
        Name("vllm.child", "Child", "run", ("a", "b", "c", "d"))
    )


def test_a_new_optional_parameter_is_a_remark_only(tree: Tree) -> None:
    finding = only(tree, "Child", "run", ("a", "b"))
    assert (finding.problem, finding.remark) == ("", "also takes c, d")


@pytest.mark.parametrize("expected", [("a",), ("b", "a", "c", "d"), ("a", "b", "c", "d", "e")])
def test_missing_renamed_reordered_or_new_required_parameters_are_problems(
    tree: Tree, expected: tuple[str, ...]
) -> None:
    assert "takes (a, b, c, d)" in only(tree, "Child", "run", expected).problem


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (Name("vllm.nowhere", "", "x", None), "module is gone"),
        (Name("vllm.child", "Lost", "x", None), "class Lost is gone"),
        (Name("vllm.child", "Child", "lost", None), "gone"),
        (Name("vllm.child", "Child", "field", ("a",)), "no longer a function"),
    ],
)
def test_what_is_gone_is_named(tree: Tree, name: Name, problem: str) -> None:
    assert check(tree, [name]) == [NameFinding(name, problem)]


def test_a_wheel_is_read_without_unpacking(tree: Tree, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-1.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in (tmp_path / "vllm").iterdir():
            archive.write(file, f"vllm/{file.name}")
    name = Name("vllm.child", "Child", "inherited", ("x",))
    assert check(Tree(wheel), [name]) == [NameFinding(name)]


def test_a_path_without_vllm_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_tree_that_lacks_the_names_is_exit_1(tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert f"{len(touched_names())} names, {len(touched_names())} problems" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs an installed vLLM")
def test_every_name_faser_touches_is_in_the_installed_vllm() -> None:
    assert [finding for finding in check(Tree(installed()), touched_names()) if finding.problem] == []


def foreign_private_names(tree: ast.AST) -> Iterator[str]:
    """Yield what is called, read or written under a private name, but for a mixin's own through `self`."""
    own = {"_replace"}  # of every named tuple
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            name = node.attr
        elif isinstance(node, ast.keyword):
            name = node.arg or ""
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and name not in own:
            yield name


def test_every_private_name_in_the_patches_stands_in_the_table() -> None:
    seen = {
        name
        for file in Path(next(iter(patches.__path__))).glob("*.py")
        for name in foreign_private_names(ast.parse(file.read_text()))
    }
    assert len(seen) > 10
    assert seen - {name.attribute for name in touched_names()} == set()


def test_the_layers_of_every_decoder_that_is_pruned_stand_in_the_table() -> None:
    checked = {name.module for name in touched_names() if name.attribute == "forward" and name.parameters}
    assert {module for module, _ in PRUNABLE_DECODERS} - checked == set()
