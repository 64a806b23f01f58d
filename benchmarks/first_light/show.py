"""Table of first-light for a terminal, in plain text without rich."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from benchmarks.first_light.rows import Row

STYLES = {
    "passed": "green",
    "failed": "bold red",
    "measured": "",
    "note": "yellow",
    "missing": "yellow",
    "absent": "dim",
}
WIDTH = 160  # of what is no terminal


def show(content: dict[str, Any], where: str) -> None:
    """Print a table for each part, and the verdict."""
    verdict = content["verdict"]
    heading = f"{content['device']['name'] or 'rehearsal on a CPU'}: {where}"
    ending = sentence(verdict)
    if find_spec("rich") is None:
        for part in content["parts"].values():
            print(
                "\n".join(
                    [
                        "",
                        title(part),
                        *(f"{row['name']:40}  {row['verdict']:8}  {row['detail']}" for row in part["rows"]),
                    ]
                )
            )
        print(f"\n{ending}\n{heading}")
        return
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH
    for part in content["parts"].values():
        console.print(_table(title(part), part["rows"]))
    console.print(ending, style="bold red" if verdict["failed"] else "bold green")
    console.print(heading)


def title(part: dict[str, Any]) -> str:
    return f"{part['heading']} ({part.get('seconds', 0.0):.0f} s)"


def _table(heading: str, rows: list[Row]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=heading, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
    )
    for _ in range(3):
        table.add_column(overflow="fold")
    for row in rows:
        style = STYLES[row["verdict"]]
        table.add_row(
            row["name"],
            Text(row["verdict"], style),
            Text(row["detail"], style if row["verdict"] == "failed" else ""),
        )
    return table


def sentence(verdict: dict[str, Any]) -> str:
    """Return the verdict as a sentence."""
    counts = verdict["counts"]
    passed, measured = counts.get("passed", 0), counts.get("measured", 0)
    lines = [
        f"{passed} proofs passed, {len(verdict['failed'])} failed; {measured} measurements, "
        f"{len(verdict['missing'])} missing."
    ]
    for name in ("failed", "missing", "absent"):
        if verdict[name]:
            lines.append(f"{name}: {'; '.join(verdict[name])}")
    if verdict["not_run"]:
        lines.append(f"not run: {', '.join(verdict['not_run'])}")
    return "\n".join(lines)
