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
            f"{options.run}/stalls has no records: no rank of this run has stalled (train.watchdog), or it "
            "is not a run's directory."
        )
    explanation = explain(ranks)
    print(json.dumps(asdict(explanation)) if options.json else text(explanation, ranks))
    return int(explanation.unmatched is None and explanation.culprit is None)


def text(explanation: Explanation, ranks: Mapping[int, Rank]) -> str:
    """The explanation in lines."""
    lines = [f"{len(ranks)} ranks are known: {', '.join(map(str, sorted(ranks)))}"]
    if explanation.unmatched is not None:
        lines.append(f"first unmatched action: {explanation.unmatched}")
    shown = explanation.chain[-MOST_LINES:]
    if len(shown) < len(explanation.chain):
        lines.append(f"{len(explanation.chain) - len(shown)} more ranks wait for those below")
    lines += shown
    if explanation.culprit is not None:
        host = ranks[explanation.culprit].host if explanation.culprit in ranks else "unknown"
        lines.append(f"rank {explanation.culprit} (host {host}) did not do its part: {explanation.instead}")
    elif explanation.waits:
        lines.append("these ranks wait for each other in a cycle")
    else:
        lines.append(
            "no rank waits for another one in vain: "
            + "; ".join(f"rank {rank.rank} in {rank}" for rank in ranks.values())
        )
    return "\n".join(lines)


def parser() -> Parser:
    tool = Parser(description=__doc__)
    tool.add_argument("run", type=as_path, metavar="RUN_DIR", help="run directory")
    tool.add_argument("--json", action="store_true", help="print JSON")
    return tool
