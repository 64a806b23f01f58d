"""Links and paths in documents, docstrings and comments lead somewhere, and no line of a paragraph becomes a list."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure.sources import BENCHMARKS, PROGRAM, ROOT, parsed, relative

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(document: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(), flags=re.DOTALL)  # code holds no links
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            dead.append(link)
    return dead


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_relative_links_lead_somewhere(document: Path):
    assert dead_links(document) == []


def test_dead_links_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n[one](page.md#a-page) [two](gone.md) [three](#nowhere) `[four](gone)` [five](https://example.org)\n"
    )
    assert dead_links(page) == ["gone.md", "#nowhere"]


FOREIGN = {
    *("_distributed.py", "config_args.py", "modeling_layers.py", "peft.py", "preprocess_data.py", "pretrain_gpt.py"),
    *("tools/preprocess_data.py", "megalite/FILE"),
}
"""Files of other projects that our texts name, and a placeholder."""
SOURCES = [
    *PROGRAM,
    *BENCHMARKS,
    *(path for room in ("tests", "docs") for path in sorted((ROOT / room).rglob("*.py"))),
]


def texts_in(path: Path) -> Iterator[str]:
    """The comments and docstrings of a Python file."""
    text = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    yield from (ast.get_docstring(node) or "" for node in ast.walk(parsed(path)) if isinstance(node, documented))


def paths_named(text: str) -> set[str]:
    """Paths from the top of the repository, and names of Python files."""
    rooms = "megalite|kernels|tests|tools|benchmarks(?!/results)|configs"
    paths = re.findall(rf"(?<![\w/.-])((?:{rooms})/[\w./]*\w)(?![\w*{{<-])", text)
    return {*paths, *re.findall(r"(?<![\w/.-])(\w+\.py)\b", text)}


def test_paths_in_the_code_exist():
    names = {path.name for path in SOURCES} | {path.name for path in ROOT.glob("*.py")}

    def missing(text: str) -> set[str]:
        named = paths_named(text) - FOREIGN - names
        return {name for name in named if not (ROOT / name).exists()}

    gone = {
        f"{relative(path)}: {name}"
        for path in SOURCES
        if missing(path.read_text(encoding="utf-8"))  # most files need no tokens
        for text in texts_in(path)
        for name in missing(text)
    }
    assert gone == set()


def test_no_sentence_is_taken_for_an_item_of_a_list():
    """A number with a dot, or a dash, that begins a line inside a paragraph."""
    items = []
    for document in DOCUMENTS:
        prose = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), document.read_text(), flags=re.DOTALL)
        lines = prose.splitlines()
        for before, line in zip(lines, lines[1:], strict=False):
            inside = before.strip() and not re.match(r"\s|\d+\. |[-+*] |#|\|", before)
            if inside and re.match(r"\d+\. |[-+*] ", line):
                items.append(f"{relative(document)}: {line}")
    assert items == []
