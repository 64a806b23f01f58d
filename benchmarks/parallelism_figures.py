"""Figures of the manual about tensor, sequence and context parallelism, ZeRO and hybrid models.

Run `python -m benchmarks.parallelism_figures DIRECTORY`. Colors represent ranks, in the figure of ZeRO kinds
of memory, and in that of layers kinds of blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.mesh.layout import Layout
from megalite.parallel.context.parts import PositionSegments, contiguous, zigzag
from megalite.planner.drawing.timeline import COLOURS, FAINT, INK, Box, Label, Picture, shade, svg

RANKS = (*COLOURS.values(), "#7a4fa3")
SHARED = "#e4e4e8"  # replicated on every rank
COMMUNICATION = "#b03a8c"
ZERO = {
    "ZeRO-0": (False, False, False),
    "ZeRO-1": (False, False, True),
    "ZeRO-2": (False, True, True),
    "ZeRO-3": (True, True, True),
}  # whether weights, gradients and optimizer state are sharded
BLOCKS = {
    "delta rule": RANKS[0],
    "Mamba-2": RANKS[1],
    "convolution": RANKS[2],
    "attention": RANKS[3],
    "feed-forward": "#c3c6cf",
    "experts": "#9fb4cc",
}  # kinds of blocks, and their colors
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "qwen3_next": (("delta rule", "experts"), ("attention with a gate", "experts")),
    "qwen3_5": (("delta rule", "feed-forward"), ("attention with a gate", "feed-forward")),
    "olmo_hybrid": (("delta rule", "feed-forward"), ("attention, norms after", "feed-forward")),
    "kimi_linear": (("delta rule by channel", "experts"), ("latent attention", "experts")),
    "nemotron_h": (("Mamba-2",), ("attention",), ("experts",), ("feed-forward",)),
    "granitemoehybrid": (("Mamba-2", "experts"), ("attention", "experts")),
    "bamba": (("Mamba-2", "feed-forward"), ("attention", "feed-forward")),
    "falcon_h1": (("Mamba-2 | attention", "feed-forward"),),
    "lfm2": (("convolution", "feed-forward"), ("attention", "feed-forward")),
}  # family: the blocks of each type of layer; | separates blocks beside each other
BYTES = {"weights": 2, "gradients": 4, "master weights and moments": 12}  # per parameter, in bf16


def _title(picture: Picture, text: str, note: str) -> None:
    picture.labels += [Label(16, 26, text, 15, bold=True), Label(16, 44, note, fill=FAINT)]


def _matrix(picture: Picture, x: float, y: float, size: tuple[float, float], name: str, split: str) -> None:
    """Draw a matrix on two ranks: split by columns or by rows, or replicated."""
    width, height = size
    if split == "whole":
        picture.boxes.append(Box(x, y, width, height, SHARED))
    for rank in range(2) if split != "whole" else ():
        if split == "columns":
            picture.boxes.append(Box(x + rank * width / 2, y, width / 2 - 1, height, RANKS[rank]))
        else:
            picture.boxes.append(Box(x, y + rank * height / 2, width, height / 2 - 1, RANKS[rank]))
    picture.labels.append(Label(x + width / 2, y + height + 17, name, anchor="middle"))


def tensor() -> Picture:
    """Draw a feed-forward block on two ranks.

    The first matrix is split by its outputs, the second by its inputs.
    """
    picture = Picture(860, 218, 1)
    _title(
        picture,
        "A feed-forward block on two tensor-parallel ranks",
        "blue: rank 0, orange: rank 1, grey: the same on both",
    )
    y = 76
    steps = (
        ((90, 80), "x  [tokens, h]", "whole", "·"),
        ((120, 90), "W₁ᵀ  [h, f], by columns", "columns", "→"),
        ((120, 80), "act(x W₁ᵀ)  [tokens, f]", "columns", "·"),
        ((90, 110), "W₂ᵀ  [f, h], by rows", "rows", "Σ"),
        ((90, 80), "y  [tokens, h]", "whole", ""),
    )
    x = 40.0
    for size, name, split, then in steps:
        _matrix(picture, x, y, size, name, split)
        x += size[0] + 38
        colour = COMMUNICATION if then == "Σ" else INK
        picture.labels.append(Label(x, y + 50, then, 26, "middle", colour, bold=then == "Σ"))
        x += 38
    picture.labels.append(Label(x - 166, y - 8, "one all-reduce", 11, "middle", COMMUNICATION))
    return picture


def sequence() -> Picture:
    """Draw a layer under sequence parallelism: the activations of two ranks between collectives."""
    picture = Picture(960, 196, 1)
    _title(
        picture,
        "A layer with sequence parallelism on two ranks",
        "bars are activations; between blocks each rank holds its half of the sequence",
    )
    parts = (
        "norm",
        "all-gather",
        "attention",
        "reduce-scatter",
        "residual, norm",
        "all-gather",
        "feed-forward",
        "reduce-scatter",
        "residual",
    )
    widths = (80, 84, 130, 100, 104, 84, 130, 100, 76)
    x = 56.0
    for part, width in zip(parts, widths, strict=True):
        collective = "gather" in part or "scatter" in part
        for rank in range(2):
            y = 70 + 44 * rank
            if collective:
                picture.labels.append(Label(x + width / 2, y + 20, "⇄", 18, "middle", COMMUNICATION))
            else:
                inside = part in ("attention", "feed-forward")
                picture.boxes.append(
                    Box(x + 2, y, width - 4, 30, RANKS[rank] if inside else shade(RANKS[rank], 1, 2))
                )
                text = ("its heads" if part == "attention" else "its columns") if inside else "half the rows"
                picture.labels.append(
                    Label(x + width / 2, y + 19, text, 10, "middle", "#ffffff" if inside else INK)
                )
        picture.labels.append(
            Label(x + width / 2, 178, part, 11, "middle", COMMUNICATION if collective else INK)
        )
        x += width
    picture.labels += [Label(14, 89 + 44 * rank, f"rank {rank}", 11) for rank in range(2)]
    return picture


def zero() -> Picture:
    """Draw the bytes per parameter on each of four ranks with the stages of ZeRO."""
    picture = Picture(860, 236, 1)
    _title(
        picture,
        "Bytes per parameter on one of four data-parallel ranks",
        "bytes, in bf16 with fp32 gradients, master weights and moments",
    )
    colours = dict(zip(BYTES, RANKS, strict=False))
    for row, (stage, shared) in enumerate(ZERO.items()):
        x, y = 90.0, 66 + 34 * row
        picture.labels.append(Label(16, y + 18, stage))
        total = 0.0
        for (kind, size), divided in zip(BYTES.items(), shared, strict=True):
            held = size / 4 if divided else float(size)
            total += held
            picture.boxes.append(Box(x, y, held * 36 - 1, 26, colours[kind]))
            x += held * 36
        picture.labels.append(Label(x + 8, y + 18, f"{total:g}", bold=True))
    x = 90.0
    for kind in BYTES:
        picture.boxes.append(Box(x, 210, 12, 12, colours[kind]))
        picture.labels.append(Label(x + 18, 220, kind, 11))
        x += 60 + 7 * len(kind)
    return picture


def _cells(
    picture: Picture, x: float, y: float, owners: Sequence[Sequence[int | None]], side: float = 22
) -> None:
    """Draw a grid with cells in the colors of ranks. None is an empty cell."""
    for row, own in enumerate(owners):
        for column, rank in enumerate(own):
            fill = SHARED if rank is None else RANKS[rank]
            picture.boxes.append(Box(x + column * side, y + row * side, side - 1.5, side - 1.5, fill))


def _owners(parts: Sequence[PositionSegments]) -> list[int]:
    """Return the rank of each position."""
    held = sorted((run.start, run.length, rank) for rank, runs in enumerate(parts) for run in runs)
    return [rank for _, length, rank in held for _ in range(length)]


def _legend(picture: Picture, x: float, y: float) -> None:
    for rank, colour in enumerate(RANKS):
        picture.boxes.append(Box(x + 72 * rank, y - 10, 12, 12, colour))
        picture.labels.append(Label(x + 72 * rank + 17, y, f"rank {rank}", 11))


def context_parts() -> Picture:
    """Draw the queries of four ranks in a causal row of eight blocks, and the keys that they see."""
    picture = Picture(860, 316, 1)
    _title(
        picture,
        "Parts of a row on four context-parallel ranks",
        "each cell is a block of queries (rows) and a block of keys (columns)",
    )
    blocks, side = 8, 22
    for x, name, note, parts in (
        (
            40.0,
            "contiguous: ulysses",
            "exchanged for whole rows; without it, work would be unequal",
            contiguous(blocks, len(RANKS)),
        ),
        (450.0, "zigzag: gather and ring", "one early and one late part each", zigzag(blocks, len(RANKS))),
    ):
        owners = _owners(parts)
        picture.labels.append(Label(x, 76, name, 12, bold=True))
        _cells(
            picture,
            x,
            88,
            [
                [owner if key <= query else None for key in range(blocks)]
                for query, owner in enumerate(owners)
            ],
            side,
        )
        seen = [
            sum(query + 1 for query, owner in enumerate(owners) if owner == rank)
            for rank in range(len(RANKS))
        ]
        picture.labels.append(Label(x + blocks * side + 14, 100, "visible blocks", 11, fill=FAINT))
        picture.labels += [
            Label(x + blocks * side + 14, 122 + 20 * rank, f"rank {rank}: {count}", 12)
            for rank, count in enumerate(seen)
        ]
        picture.labels.append(Label(x, 284, note, 11, fill=FAINT))
    _legend(picture, 40, 306)
    return picture


def context_moves() -> Picture:
    """Draw the communication of each context-parallel method in the forward of one layer's attention."""
    picture = Picture(960, 276, 1)
    _title(
        picture,
        "Communication of attention in one layer on four context-parallel ranks",
        "forward; backward sends gradients the opposite way",
    )
    count, side, y = len(RANKS), 22, 104
    ranks = range(count)

    x = 40.0
    picture.labels.append(Label(x, 76, "ulysses: heads for positions", 12, bold=True))
    for start, name, owners in (
        (x, "q, k, v", [list(ranks) for _ in ranks]),
        (x + 150, "with whole rows", [[row for _ in ranks] for row in ranks]),
    ):
        _cells(picture, start, y, owners, side)
        picture.labels.append(Label(start, y - 8, name, 11))
        picture.labels.append(Label(start, y + count * side + 16, "positions →   heads ↓", 10, fill=FAINT))
    picture.labels.append(Label(x + 119, y + 50, "⇄", 20, "middle", COMMUNICATION))
    picture.labels.append(
        Label(x, y + count * side + 40, "all-to-all, and back for the output", 11, fill=COMMUNICATION)
    )

    x = 390.0
    row = _owners(zigzag(2 * count, count))
    picture.labels.append(Label(x, 76, "gather: all keys and values", 12, bold=True))
    picture.labels.append(Label(x, y - 8, "queries of rank 1", 11))
    _cells(picture, x, y, [[owner if owner == 1 else None for owner in row]], side)
    picture.labels.append(Label(x, y + 54, "keys and values, on every rank", 11))
    _cells(picture, x, y + 62, [row], side)
    picture.labels.append(Label(x, y + count * side + 40, "all-gather", 11, fill=COMMUNICATION))

    x = 650.0
    picture.labels.append(Label(x, 76, "ring: keys and values part by part", 12, bold=True))
    picture.labels.append(Label(x + 52, y - 8, "owner of the keys and values", 11))
    for rank in ranks:
        picture.labels.append(Label(x, y + 15 + side * rank, f"rank {rank}", 11))
    for hop in ranks:
        _cells(picture, x + 52 + 48 * hop, y, [[(rank - hop) % count] for rank in ranks], side)
        if hop:
            picture.labels.append(Label(x + 52 + 48 * hop - 14, y + 52, "→", 16, "middle", COMMUNICATION))
    picture.labels.append(
        Label(
            x,
            y + count * side + 40,
            f"{count - 1} hops, overlapped with attention to each part",
            11,
            fill=COMMUNICATION,
        )
    )
    _legend(picture, 40, 262)
    return picture


def states() -> Picture:
    """Draw how the states of a recurrence are passed between the zigzag parts of four ranks."""
    picture = Picture(960, 426, 1)
    _title(
        picture,
        "The state of a row on four context-parallel ranks, with zigzag parts",
        "each box is one of eight segments, in the order of positions",
    )
    count, left, width, height = len(RANKS), 150.0, 97.0, 34.0
    owners = _owners(zigzag(2 * count, count))
    last = len(owners) - 1
    start = 4  # the segment in which the second document starts
    picture.labels.append(Label(left + start * width + 30, 71, "▼ a document starts here", 10, fill=INK))
    for y, name, note, texts in (
        (76, "tokens", "", [f"segment {j}" for j in range(last + 1)]),
        (130, "forward", "each rank, own segments", ["M, N"] * (last + 1)),
        (208, "states before", "every rank, left to right", ["S0 = 0", *(f"S{j + 1}" for j in range(last))]),
        (278, "backward", "each rank, own outputs", ["R"] * (last + 1)),
        (
            356,
            "gradients after",
            "every rank, right to left",
            [*(f"D{j}" for j in range(last)), f"D{last} = 0"],
        ),
    ):
        if name == "forward":
            texts[start] = "M = 0, N"
        picture.labels += [Label(14, y + 16, name, 12, bold=True), Label(14, y + 31, note, 9.5, fill=FAINT)]
        replicated = note.startswith("every")
        own_width = width - (18 if replicated else 3)
        for j, (owner, text) in enumerate(zip(owners, texts, strict=True)):
            x = left + j * width
            picture.boxes.append(Box(x, y, own_width, height, SHARED if replicated else RANKS[owner]))
            ink = INK if replicated else "#ffffff"
            picture.labels.append(Label(x + own_width / 2, y + 21, text, 12, "middle", ink))
            if replicated and j < last:
                arrow = "→" if name == "states before" else "←"
                picture.labels.append(Label(x + width - 9, y + 22, arrow, 14, "middle", COMMUNICATION))
    for y, sent, formula, then in (
        (190, "all-gather of M and N", "S(j+1) = M(j) S(j) + N(j)", "then outputs of own segments, from S"),
        (
            338,
            "all-gather of R",
            "D(j−1) = R(j) + M(j)ᵀ D(j)",
            "then gradients of own segments, from S and D",
        ),
    ):
        picture.labels += [
            Label(left, y, sent, 11.5, fill=COMMUNICATION),
            Label(left + 200, y, formula, 11.5, fill=COMMUNICATION),
            Label(left + 420, y, then, 11.5, fill=COMMUNICATION),
        ]
    _legend(picture, left, 412)
    return picture


def _layer(picture: Picture, x: float, y: float, blocks: Sequence[str]) -> float:
    """Draw the blocks of a layer with their norms. Return where it ends."""
    height, width, norm = 30.0, 122.0, 9.0
    after = any("norms after" in block for block in blocks)
    for block in blocks:
        if not after:
            picture.boxes.append(Box(x, y, norm, height, INK))
            x += norm + 1
        beside = [name.strip() for name in block.split("|")]
        own = height / len(beside)
        for number, name in enumerate(beside):
            colour = next(fill for kind, fill in BLOCKS.items() if kind in name)
            top = y + number * own
            picture.boxes.append(Box(x, top, width, own - (1 if len(beside) > 1 else 0), colour))
            ink = INK if colour in list(BLOCKS.values())[4:] else "#ffffff"
            shown = name.removesuffix(", norms after")
            picture.labels.append(Label(x + width / 2, top + own / 2 + 3.5, shown, 10, "middle", ink))
        x += width + 1
        if after:
            picture.boxes.append(Box(x, y, norm, height, INK))
            x += norm + 1
        x += 3
    return x


def layers() -> Picture:
    """Draw the types of layers of each family of hybrid models."""
    row = 44.0
    picture = Picture(880, 76 + row * len(LAYERS) + 20, 1)
    _title(
        picture,
        "The types of layers of each family",
        "black: norms; each output is added to the residual stream; blocks above each other share a norm",
    )
    for number, (family, types) in enumerate(LAYERS.items()):
        y = 66 + row * number
        picture.labels.append(Label(16, y + 19, family, 12, bold=True))
        x = 160.0
        for blocks in types:
            x = _layer(picture, x, y, blocks) + 34
    x = 160.0
    for kind, colour in BLOCKS.items():
        picture.boxes.append(Box(x, picture.height - 24, 12, 12, colour))
        picture.labels.append(Label(x + 18, picture.height - 14, kind, 11))
        x += 56 + 7 * len(kind)
    return picture


def step() -> Picture:
    """Draw the eight ranks of TP2 × PP2 × DP2, and the messages of a step of four microbatches under 1F1B."""
    drawn = Picture(890, 452, 1)
    _title(
        drawn,
        "One step of TP2 × PP2 × DP2: state and communication of each rank",
        "each box is a rank, numbered as in `python -m megalite.mesh --tp 2 --pp 2 --dp 2`",
    )
    layout = Layout(tp=2, pp=2, dp=2)
    microbatches = 4
    left, top, width, height, gap = 110.0, 84.0, 290.0, 48.0, 24.0
    for stage in range(2):
        x = left + stage * 470
        drawn.labels.append(
            Label(
                x + width / 2,
                72,
                f"stage {stage}: {'first' if stage == 0 else 'second'} half of the layers",
                12,
                "middle",
                bold=True,
            )
        )
        for replica in range(2):
            y = top + replica * 166
            for part in range(2):
                rank = layout.rank({"pp": stage, "dp": replica, "cp": 0, "tp": part})
                drawn.boxes.append(Box(x, y + part * (height + gap), width, height, RANKS[part]))
                drawn.labels += [
                    Label(
                        x + 12, y + part * (height + gap) + 21, f"rank {rank}", 13, fill="#ffffff", bold=True
                    ),
                    Label(
                        x + 12,
                        y + part * (height + gap) + 39,
                        f"half {part} of each matrix; shard {replica} of the optimizer",
                        11,
                        fill="#ffffff",
                    ),
                ]
            drawn.labels.append(
                Label(x + width / 2, y + height + 18, "⇅ tp", 15, "middle", COMMUNICATION, bold=True)
            )
    for replica in range(2):
        y = top + replica * 166
        drawn.labels += [
            Label(14, y + 56, f"replica {replica}", 12, bold=True),
            Label(14, y + 74, f"{microbatches} microbatches", 11, fill=FAINT),
            Label(490, y + 34, "activations →", 12, "middle", COMMUNICATION),
            Label(490, y + 52, f"{microbatches} per rank", 11, "middle", FAINT),
            Label(490, y + 76, "← gradients", 12, "middle", COMMUNICATION),
            Label(490, y + 94, f"{microbatches} per rank", 11, "middle", FAINT),
        ]
    for stage in range(2):
        drawn.labels.append(
            Label(left + stage * 470 + width / 2, top + 147, "⇅ dp", 15, "middle", COMMUNICATION, bold=True)
        )
    for row, text in enumerate(
        (
            "tp, inside each layer of each microbatch: all-gather and reduce-scatter of activations "
            "(sequence parallelism), as the layer computes",
            "pp, for each microbatch: one send to the next stage in forward, one to the previous stage in "
            "backward",
            "dp, once per step, bucket by bucket: reduce-scatter of gradients as backward completes them, "
            "all-gather of updated weights before the next forward",
        )
    ):
        drawn.labels.append(Label(14, 402 + 19 * row, text, 11.5))
    return drawn


FIGURES = {
    "step": step,
    "tensor": tensor,
    "sequence": sequence,
    "zero": zero,
    "context-parts": context_parts,
    "context-moves": context_moves,
    "states": states,
    "layers": layers,
}


if __name__ == "__main__":
    for name, figure in FIGURES.items():
        Path(sys.argv[1], f"{name}.svg").write_text(svg(figure()), encoding="utf-8")
