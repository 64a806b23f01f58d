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
    found = explain(ranks)
    print(json.dumps(asdict(found)) if options.json else text(found, ranks))
    return int(found.unmatched is None and found.culprit is None)


def text(found: Explanation, ranks: Mapping[int, Rank]) -> str:
    """The explanation in lines."""
    lines = [f"{len(ranks)} ranks are known: {', '.join(map(str, sorted(ranks)))}"]
    if found.unmatched is not None:
        lines.append(f"first unmatched action: {found.unmatched}")
    shown = found.chain[-MOST_LINES:]
    if len(shown) < len(found.chain):
        lines.append(f"{len(found.chain) - len(shown)} more ranks wait for those below")
    lines += shown
    if found.culprit is not None:
        host = ranks[found.culprit].host if found.culprit in ranks else "unknown"
        lines.append(f"rank {found.culprit} (host {host}) did not do its part: {found.instead}")
    elif found.waits:
        lines.append("these ranks wait for each other in a cycle")
    else:
        lines.append(
            "no rank waits for another one in vain: "
            + "; ".join(f"rank {each.rank} in {each}" for each in ranks.values())
        )
    return "\n".join(lines)


def parser() -> Parser:
    made = Parser(description=__doc__)
    made.add_argument("run", type=as_path, metavar="RUN_DIR", help="run directory")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made
