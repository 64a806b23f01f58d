"""MkDocs hook: the site has pages alone, so a page's links to source files become their paths; in a checkout they lead there."""

from __future__ import annotations

import re
from typing import Any

SOURCE = re.compile(r"\[[^\]]+\]\(\.\./((?:megalite|kernels)/[^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """[text](../megalite/FILE) → `megalite/FILE`."""
    return SOURCE.sub(r"`\1`", markdown)
