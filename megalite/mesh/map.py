"""Prints a mesh as text: at the start of a run, and for `python -m megalite.mesh --tp 2 --pp 2 --dp 2`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product

from megalite.mesh.layout import AXES, PRODUCTS, Layout

Groups = list[tuple[int, ...]]


def describe(layout: Layout) -> str:
    """Return the mesh as text: a row per (pp, dp, cp), with its tp ranks."""
    sizes = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in AXES) + (
        f", ep {layout.ep}" if layout.ep > 1 else ""
    )
    lines = [f"{layout.world} rank{'s' * (layout.world > 1)}: {sizes}"]
    for pp, dp, cp in product(range(layout.pp), range(layout.dp), range(layout.cp)):
        ranks = [layout.rank({"pp": pp, "dp": dp, "cp": cp, "tp": tp}) for tp in range(layout.tp)]
        lines.append(
            f"  stage {pp}  replica {dp}"
            + (f"  context {cp}" if layout.cp > 1 else "")
            + f"  tp ranks {ranks}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megalite.mesh", description="Print the ranks of a mesh and their process groups."
    )
    for axis in reversed(AXES):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"size of the {axis} axis")
    parser.add_argument(
        "--ep", type=int, default=1, help="number of ranks over which the experts of a layer are split"
    )
    sizes = vars(parser.parse_args(argv))
    for axis, size in sizes.items():
        if size < 1:
            parser.error(f"--{axis} must be a positive integer, got {size}.")
    layout = Layout(**sizes)
    if layout.stage_ranks % layout.ep:
        parser.error(
            f"--ep must divide dp * cp * tp ({layout.stage_ranks}), the number of ranks of a stage, "
            f"got {layout.ep}."
        )
    print(describe(layout))
    groups = {axis: _peers(layout, axis) for axis in reversed(AXES)} | {
        name: _peers(layout, *axes) for name, axes in PRODUCTS.items()
    }
    if layout.ep > 1:
        groups |= _of_experts(layout, groups["stage"])
    for name, ranks in groups.items():
        print(f"{name:>11}: " + " ".join(str(list(group)) for group in ranks))


def _peers(layout: Layout, *axes: str) -> Groups:
    return sorted({layout.peers(rank, axes) for rank in range(layout.world)})


def _of_experts(layout: Layout, stages: Groups) -> dict[str, Groups]:
    """Return the groups of ranks that divide a layer's experts, and of ranks that hold the same experts.

    Gradients of experts are summed over the latter.
    """
    ep = layout.ep
    return {
        "ep": [stage[first : first + ep] for stage in stages for first in range(0, len(stage), ep)],
        "expert_data": [stage[index::ep] for stage in stages for index in range(ep)],
    }
