"""Documents: no link leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.structure.sources import ROOT, relative

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
    page.write_text("# A page\n[one](page.md#a-page) [two](gone.md) [three](#nowhere) `[four](gone)` [five](https://example.org)\n")
    assert dead_links(page) == ["gone.md", "#nowhere"]
