"""Explain a hang: which rank did not do its part, who waited for it, and what it did instead.

    megalite explain runs/run

Reads stalls/ in the run's directory, which every rank fills when it makes no progress (train.watchdog) or
loses another one: places in the plan, collectives started, torch's flight record. Exits with 1 if nothing
there hangs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict

from megalite.commands.parser import Parser, as_path
from megalite.training.hang import Explanation, Rank, explain, load

MOST_LINES = 16


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    options = tool.parse_args(argv)
    ranks = load(options.run)
    if not ranks:
        tool.error(
            f"no records found in {options.run}/stalls. Either no rank has stalled (train.watchdog), or "
            f"{options.run} is not a run directory."
        )
    explanation = explain(ranks)
    print(json.dumps(asdict(explanation)) if options.json else text(explanation, ranks))
    return int(explanation.unmatched is None and explanation.culprit is None)


def text(explanation: Explanation, ranks: Mapping[int, Rank]) -> str:
    """Format the explanation."""
    lines = [f"{len(ranks)} ranks have records: {', '.join(map(str, sorted(ranks)))}"]
    if explanation.unmatched is not None:
        lines.append(f"first unmatched action: {explanation.unmatched}")
    shown = explanation.chain[-MOST_LINES:]
    if len(shown) < len(explanation.chain):
        lines.append(f"{len(explanation.chain) - len(shown)} more ranks wait for the ones below")
    lines += shown
    if explanation.culprit is not None:
        host = ranks[explanation.culprit].host if explanation.culprit in ranks else "unknown"
        lines.append(f"rank {explanation.culprit} (host {host}) caused the hang: {explanation.instead}")
    elif explanation.waits:
        lines.append("these ranks wait for each other (deadlock)")
    else:
        lines.append(
            "no rank waits for an action that another rank skipped: "
            + "; ".join(f"rank {rank.rank} in {rank}" for rank in ranks.values())
        )
    return "\n".join(lines)


def parser() -> Parser:
    tool = Parser(description=__doc__)
    tool.add_argument("run", type=as_path, metavar="RUN_DIR", help="run directory")
    tool.add_argument("--json", action="store_true", help="print JSON")
    return tool
