"""The library that computes fp32 matmuls on a CPU: MKL, or oneDNN, which is faster on some processors
and slower on others.

torch has one setting for both questions, which library and how precise: "highest" selects MKL, "medium"
oneDNN, which on processors with matrix units rounds the factors to bf16 and elsewhere computes in fp32.
`rounds` therefore asks the result, not the processor's flags. Setting and measuring need no process group;
`training.matmul_choice` chooses for all ranks of a run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from time import process_time
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Path = Literal["mkl", "onednn", "bf16"]
"""mkl and onednn: fp32 throughout; bf16: oneDNN that rounds the factors, where `rounds` says so."""
SETTINGS: Mapping[Path, str] = {"mkl": "highest", "onednn": "medium", "bf16": "medium"}
NAMES: Mapping[Path, str] = {"mkl": "MKL", "onednn": "oneDNN", "bf16": "oneDNN in bf16"}
LEAST_REPEATS, MOST_REPEATS = 2, 8  # of the measured matmuls; the first one prepares
BUDGET_S = 0.15  # processor seconds, of all threads, after which no repetition starts
MOST_FLOPS = 1e8  # of a measured matmul, about 1 ms on one core: a larger one is measured in part


class MatmulShape(NamedTuple):
    """A matmul of a step.

    The shape is [batch, rows, inner] · [batch, inner, columns], or two-dimensional if `batch` is 0.

    Attributes:
        times: how often a step computes it.
        transposed: which factors are transposed views, as a linear layer's weight is in its forward pass.
    """

    rows: int
    inner: int
    columns: int
    transposed: tuple[bool, bool] = (False, False)
    batch: int = 0
    times: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of one such matmul."""
        return 2.0 * max(self.batch, 1) * self.rows * self.inner * self.columns


@functools.cache
def rounds() -> bool:
    """Return whether oneDNN rounds fp32 factors to bf16 in this process."""
    before = torch.get_float32_matmul_precision()
    factor = torch.full((128, 128), 1.0 + 2.0**-12)  # is 1 in bf16
    try:
        torch.set_float32_matmul_precision("medium")
        return bool(torch.mm(factor, factor).sub_(128.0).abs().max() < 2.0**-10)
    finally:
        torch.set_float32_matmul_precision(before)


def default() -> Path:
    """Return the library used in deterministic runs and without a measurement."""
    return "mkl" if rounds() else "onednn"


def use(path: Path) -> None:
    """Select the library for fp32 matmuls in this process."""
    torch.set_float32_matmul_precision(SETTINGS[path])


def in_use() -> str:
    """Return the name of the library that computes fp32 matmuls in this process."""
    if torch.get_float32_matmul_precision() == SETTINGS["mkl"]:
        return NAMES["mkl"]
    return NAMES["bf16" if rounds() else "onednn"]


def candidates(option: str, rounded: bool) -> tuple[Path, ...]:
    """Return the libraries that `train.fp32_matmul` allows, the preferred one first.

    Args:
        rounded: oneDNN rounds factors to bf16 (`rounds`, on any rank).
    """
    if option == "mkl" or (rounded and option != "bf16"):
        return ("mkl",)
    if option == "onednn":
        return ("onednn",)
    return ("bf16" if rounded else "onednn", "mkl")


def measure(matmuls: Sequence[MatmulShape], paths: Sequence[Path]) -> dict[Path, float]:
    """Measure the processor seconds of a step's matmuls in each library.

    This takes about 0.2 processor seconds for any model. The libraries alternate matmul by matmul, the list
    is repeated, and the best time of each counts. All threads of the process are counted, so that ranks that
    share cores and other programs change the result little.
    """
    best: dict[tuple[int, Path], float] = {}
    operands = [_operands(matmul) for matmul in matmuls]
    deadline = process_time() + BUDGET_S
    for repeat in range(MOST_REPEATS):
        if repeat >= LEAST_REPEATS and process_time() > deadline:
            break
        for number, (first, second, scale) in enumerate(operands):
            for path in paths:
                use(path)
                started = process_time()
                torch.matmul(first, second)
                seconds = scale * (process_time() - started)
                best[number, path] = min(seconds, best.get((number, path), seconds))
    return {
        path: sum(matmul.times * best[number, path] for number, matmul in enumerate(matmuls))
        for path in paths
    }


def _operands(matmul: MatmulShape) -> tuple[Tensor, Tensor, float]:
    """Return two factors, cut if large, and the ratio of the whole matmul's FLOPs to theirs."""
    batch, rows, inner, columns = (
        min(size, 2048) for size in (matmul.batch, matmul.rows, matmul.inner, matmul.columns)
    )
    while 2.0 * max(batch, 1) * rows * inner * columns > MOST_FLOPS and max(batch, rows, inner, columns) > 64:
        if batch > 1:
            batch = -(-batch // 2)
        elif rows >= max(inner, columns):
            rows = -(-rows // 2)
        elif columns >= inner:
            columns = -(-columns // 2)
        else:
            inner = -(-inner // 2)
    cut = matmul._replace(batch=batch, rows=rows, inner=inner, columns=columns)
    first = _filled((rows, inner), batch, matmul.transposed[0])
    return first, _filled((inner, columns), batch, matmul.transposed[1]), matmul.flops / cut.flops


def _filled(shape: tuple[int, int], batch: int, transposed: bool) -> Tensor:
    """Return a constant matrix or batch. Random numbers would advance the generator of the process."""
    leading = [batch] if batch else []
    return torch.full([*leading, *shape[::-1]], 0.5).mT if transposed else torch.full([*leading, *shape], 0.5)
