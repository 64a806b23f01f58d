"""The files, tests and commands that pages name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.structure.sources import ROOT, relative

DOCS = ROOT / "docs"
WITH_PATHS = [
    ROOT / "CONTRIBUTING.md",
    DOCS / "architecture.md",
    DOCS / "status.md",
    *sorted((DOCS / "decisions").glob("*.md")),
]
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
ANY_NAME = re.compile("NAME|OPERATION")
# files of a run's directory, and one that must not exist
NOT_IN_THE_TREE = ("config.yaml", "starts.jsonl", "metrics.jsonl", "checkpoints/", "kernels/__init__.py")


def named_paths(text: str) -> Iterator[str]:
    """Code in backticks that is a path: it contains a slash or ends as a file does."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", prose):
        if re.fullmatch(r"[\w./-]+", code) and ("/" in code or re.search(r"\.(py|md|toml|yaml|yml|txt|jsonl)$", code)):
            yield code


def missing(text: str, root: Path = ROOT) -> list[str]:
    """Named paths that do not exist under `root`."""
    paths = [path for path in named_paths(text) if path not in NOT_IN_THE_TREE]
    return [path for path in paths if not any(root.glob(ANY_NAME.sub("*", path).rstrip("/")))]


def tree(page: str) -> list[str]:
    """The paths of the page's tree. An indented line belongs to the directory above it."""
    block = page[page.index("## The tree") :].split("```")[1]
    paths: list[str] = []
    parents: list[str] = []
    for line in filter(None, block.splitlines()):
        indent = len(line) - len(line.lstrip())
        names = line.strip().partition("  ")[0]
        del parents[indent // 2 :]
        paths += ["".join(parents) + name for name in names.split(", ")]
        parents.append(names)
    return paths


def missing_tests(page: str) -> list[str]:
    """The tests that a page names as `PATH::NAME`, relative to tests/, and that do not exist."""
    named = [(ROOT / "tests" / path, name) for path, name in TEST.findall(page)]
    return [
        f"{relative(path)}::{name}"
        for path, name in named
        if not path.is_file() or f"def {name}(" not in path.read_text()
    ]


@pytest.mark.parametrize("page", WITH_PATHS, ids=relative)
def test_every_named_path_exists(page: Path):
    assert missing(page.read_text()) == []


def test_missing_paths_are_detected(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b_triton.py").touch()
    text = "`a/b_triton.py` `a/OPERATION_triton.py` `a/` `tp2/pp2 x` `a.b()` `a/NAME.md` `c.py`\n```\nd.py\n```"
    assert missing(text, tmp_path) == ["a/NAME.md", "c.py"]


def test_the_tree_names_every_room_and_module_once():
    named = tree((DOCS / "architecture.md").read_text())
    assert len(named) == len(set(named)) and [path for path in named if not (ROOT / path).exists()] == []
    listed = {str(Path(path)) for path in named}
    rooms = [path.parent for path in (ROOT / "megalite").rglob("__init__.py")]
    covered = [
        room
        for room in rooms
        if relative(room) in listed or any(Path(path) in room.relative_to(ROOT).parents for path in listed)
    ]
    modules = [path for path in (ROOT / "megalite").glob("*.py") if path.name != "__init__.py"]
    assert rooms == covered and all(relative(path) in listed for path in modules)
    # a room of which one file is listed is listed completely
    detailed = {str(Path(path).parent) for path in listed if path.endswith(".py")} - {"."}
    files = {relative(path) for room in detailed for path in (ROOT / room).glob("*.py") if path.name != "__init__.py"}
    assert sorted(files - listed) == []


def test_every_page_of_the_manual_is_on_its_first_page_and_in_its_navigation():
    pages = {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    navigation = re.findall(r"^ +- .+: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert pages | {"index.md"} == set(navigation) and len(navigation) == len(set(navigation))
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / "index.md").read_text()))


def test_where_to_look_names_what_is_in_its_file():
    page = (DOCS / "architecture.md").read_text()
    named = re.findall(r"`([A-Za-z_.]+)` in `([\w/]+\.py)`", page[page.index("## Where to look") :])
    assert len(named) > 10
    for name, path in named:
        owner, _, method = name.rpartition(".")
        source = (ROOT / path).read_text()
        assert re.search(rf"^(?:class|def) {owner or method}\b", source, re.MULTILINE), f"{name} in {path}"
        assert not owner or re.search(rf"^    def {method}\b", source, re.MULTILINE), f"{name} in {path}"


@pytest.mark.parametrize("page", ["features.md", "hybrids.md", "traps.md"])
def test_every_named_test_exists(page: str):
    text = (DOCS / page).read_text()
    assert TEST.search(text) and missing_tests(text) == []


def test_every_feature_names_a_test():
    rows = [line for line in (DOCS / "features.md").read_text().splitlines() if re.match(r"\| (?!feature)", line)]
    assert rows and [row for row in rows if not TEST.search(row)] == []


def test_hooks_and_workflow_run_what_make_runs():
    makefile = (ROOT / "Makefile").read_text()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    programs = [" ".join(hook["entry"].replace(".venv/bin/", "$(BIN)/").split()[:2]) for hook in hooks]
    assert [program for program in programs if program not in makefile] == []
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    assert commands and {command.removeprefix("make ") for command in commands} <= targets


def test_the_commands_of_contributing_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?:`|^)make ([\w-]+)(?:`|$)", page, re.MULTILINE))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert "install" in named and named <= targets
    ((directory, word),) = re.findall(r"-m pytest (\S+) -k (\w+)", page)
    assert any(re.search(rf"def test_\w*{word}", path.read_text()) for path in (ROOT / directory).glob("test_*.py"))
