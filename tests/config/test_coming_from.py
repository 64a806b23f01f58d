"""docs/coming-from.md: the names in its tables are those that the program knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalite.config.schema import OPTIONS
from megalite.config.suggestions import other_names

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text()
ROWS = re.findall(r"^\| `(?:--)?([\w.-]+)` \| (.+) \|$", PAGE, re.MULTILINE)


def options(text: str) -> list[str]:
    return re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", text)


@pytest.mark.parametrize(("name", "here"), ROWS, ids=[f"{name}-{number}" for number, (name, _) in enumerate(ROWS)])
def test_a_row_names_an_option_that_its_other_name_leads_to(name, here):
    ours = options(here)
    assert ours and set(ours) <= OPTIONS.keys()
    last = name.split(".")[-1].replace("-", "_")
    known = other_names().get(last)
    assert ours[0] in options(known) if known else ours[0].split(".")[-1] == last


def test_every_row_is_read():
    assert len(ROWS) == len(re.findall(r"^\| `", PAGE, re.MULTILINE)) > 100
