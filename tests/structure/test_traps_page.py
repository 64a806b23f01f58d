"""The page of traps names tests that exist."""

import re

from tests.structure.sources import ROOT

PAGE = ROOT / "docs" / "traps.md"


def test_every_named_test_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / "tests" / path).read_text()]
    assert named and not missing
