"""The manual's example of an optimizer in a file of the user."""

from __future__ import annotations

import re
from pathlib import Path

from tests.structure.sources import ROOT

CLASS = "AdaBelief"


def write(directory: Path) -> str:
    """Write the file that the manual shows. Returns its optimizer.name."""
    (text,) = re.findall(
        r'^```python title="my_optimizer.py"\n(.*?)^```',
        (ROOT / "docs" / "optimizer.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    path = directory / "my_optimizer.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}:{CLASS}"
