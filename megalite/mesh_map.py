"""Prints a mesh as text: at the start of a run, and for `python -m megalite.mesh --tp 2 --pp 2 --dp 2`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product

from megalite.layout import AXES, PRODUCTS, Layout


def describe(layout: Layout) -> str:
    """The mesh as text: a row per (pp, dp, cp), with its tp ranks."""
    lines = [f"{layout.world} rank{'s' * (layout.world > 1)}: pp {layout.pp} × dp {layout.dp} × cp {layout.cp} × tp {layout.tp}"]
    for pp, dp, cp in product(range(layout.pp), range(layout.dp), range(layout.cp)):
        ranks = [layout.rank({"pp": pp, "dp": dp, "cp": cp, "tp": tp}) for tp in range(layout.tp)]
        lines.append(f"  stage {pp}  replica {dp}" + (f"  context {cp}" if layout.cp > 1 else "") + f"  tp ranks {ranks}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megalite.mesh", description="Print the ranks of a mesh and their process groups.")
    for axis in reversed(AXES):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"size of the {axis} axis")
    sizes = vars(parser.parse_args(argv))
    for axis, size in sizes.items():
        if size < 1:
            parser.error(f"--{axis} = {size}: an axis has at least one rank")
    layout = Layout(**sizes)
    print(describe(layout))
    for name, axes in (*((axis, (axis,)) for axis in reversed(AXES)), *PRODUCTS.items()):
        groups = sorted({layout.peers(rank, axes) for rank in range(layout.world)})
        print(f"{name:>6}: " + " ".join(str(list(group)) for group in groups))
