"""MkDocs hook: replaces links to source files and results, which are valid in a checkout but not on the site,
by the files' paths."""

from __future__ import annotations

import re
from typing import Any

SOURCE = re.compile(r"!?\[[^\]]+\]\(\.\./((?:megalite|kernels|benchmarks)/[^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """[text](../megalite/FILE) → `megalite/FILE`."""
    return SOURCE.sub(r"`\1`", markdown)
