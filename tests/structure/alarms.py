"""Files and functions that are long: `python -m tests.structure.alarms`, which `make lint` runs.

An alarm, not a limit: where one rings, ask whether the file is still one subject. It never fails.
"""

from __future__ import annotations

import ast

from tests.structure.sources import PROGRAM, relative

LONG_FILE, LONG_FUNCTION = 700, 80


def alarms(name: str, text: str) -> list[str]:
    """A line if the file is long, and one for each long function in it."""
    lines = len(text.splitlines())
    rung = [f"{name}: {lines} lines"] if lines > LONG_FILE else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONG_FUNCTION:
                rung.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    return rung


if __name__ == "__main__":
    for path in PROGRAM:
        for line in alarms(relative(path), path.read_text()):
            print(line)
