"""Comparison of a run in fp8 with the same run in its compute dtype (`megalite verify --fp8`).

Losses of two runs part without a fault, because rounded operands are other operands, and a difference in one
layer spreads to all others. A fault is therefore looked for in each matmul by itself, from the inputs that it
has in the run in fp8:

    operand    each code is the nearest one: codes · scales is within half the spacing of e4m3 from the value,
               at the scale that the recipe gives for the largest element of the block, in fp64
    product    the result is that of its codes, except for the rounding of its sums (`ACCUMULATION`)

Together they bound the difference from the product of operands that are not rounded. A wrong scale, codes of
old weights or scales that a kernel mixes up exceed one of them by orders of magnitude, in one layer only.
Both runs are separate process trees, in which `verify.run_ranks` starts this module on each rank.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from megalite_kernels.fp8 import BLOCK, LARGEST, MX_BLOCK, Quantized, dequantize
from megalite_kernels.groups import Groups
from torch import Tensor

from megalite.assembly import parts as build
from megalite.assembly.fp8_matrices import fp8_matrices
from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config
from megalite.launch.process import choose_device, configure_process, shutdown, start_process_group
from megalite.parallel.fp8 import PRODUCTS, Fp8Format, Fp8Matmuls, OperandName
from megalite.training.trainer import Trainer
from megalite.training.verify import config_in

ACCUMULATION = 2.0**-10
"""Largest error of a product, relative to the sum of its terms' magnitudes: that of 16,384 terms in fp32."""
NEAREST = 1 + 2.0**-12
"""Largest distance of a code from its value in units of half a spacing: 1, and the rounding of the scale."""
SMALLEST_AMAX = 1e-12  # of the recipe with fp32 scales


@dataclass(frozen=True)
class Fp8Difference:
    """A matmul that differs from that of operands that are not rounded by more than rounding explains.

    Attributes:
        matrix: the stored name of the weight.
        product: forward or input_gradient.
        operand: x, w or dy, whose codes are wrong; None: they are right, but the result is not theirs.
        excess: how many times as large as the bound the difference is.
    """

    step: int
    matrix: str
    product: str
    operand: str | None
    rank: int
    excess: float

    def __str__(self) -> str:
        where = f"{self.matrix}, {self.product.replace('_', ' ')}, rank {self.rank}"
        what, exact = "the product", "that of its codes"
        if self.operand is not None:
            what, exact = self.operand, "its values"
        return (
            f"step {self.step}: {where}: {what} differs from {exact} by {self.excess:.3g} times what "
            "rounding explains"
        )


@dataclass(frozen=True)
class Fp8Comparison:
    """Result of a comparison.

    Attributes:
        losses: the loss of each step in fp8, and in the compute dtype.
        errors: matrix → product → largest relative error, beside operands that are not rounded.
        difference: the first matmul with a fault: by step, forward before backward, in the order of layers.
    """

    losses: list[tuple[float, float]]
    errors: dict[str, dict[str, float]]
    difference: Fp8Difference | None

    @property
    def largest_error(self) -> tuple[float, str, str]:
        """Return the largest error of a product, with its matrix and its name. There must be one."""
        return max(
            (error, matrix, name) for matrix, own in self.errors.items() for name, error in own.items()
        )

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain data. Numbers that are not finite are None."""
        losses = [[loss if isfinite(loss) else None for loss in pair] for pair in self.losses]
        difference = None if self.difference is None else asdict(self.difference)
        if difference is not None and not isfinite(difference["excess"]):
            difference["excess"] = None
        return {"losses": losses, "errors": self.errors, "difference": difference}


def without_fp8(config: Config) -> Config:
    """Return the configuration with all matmuls in the compute dtype."""
    plain = from_dict(to_dict(config))
    plain.train = replace(plain.train, fp8="none", fp8_power_of_two=False, fp8_first_last=0)
    plain.logging = replace(plain.logging, fp8_interval=None)
    return plain


# ---- one matmul


def operand_excess(values: Tensor, codes: Quantized, fp8: Fp8Format, weight: bool) -> float:
    """Return the largest distance of a code from its value, in units of half the spacing of codes there.

    Args:
        values: [.., rows, columns], quantized along the columns.
        weight: whether blocks are those of a weight.
    """
    if not values.numel():
        return 0.0
    rows, columns = (1, MX_BLOCK) if fp8.recipe == "mxfp8" else (BLOCK if weight else 1, BLOCK)
    exact = values.float().double()
    blocks = exact.unflatten(-1, (-1, columns)).unflatten(
        -3, (-1, rows)
    )  # [.., rows, in a block, columns, ..]
    amax = blocks.abs().amax((-3, -1), keepdim=True)
    if fp8.recipe == "mxfp8":
        scale = _power_of_two(amax / LARGEST).clamp(min=2.0**-127)
    else:
        scale = amax.clamp(min=SMALLEST_AMAX) / LARGEST
        scale = _power_of_two(scale) if fp8.power_of_two else scale
    # spacing of numbers in [2ᵉ, 2ᵉ⁺¹): 2ᵉ⁻³, and of those below 2⁻⁶ as above
    exponents = torch.frexp(blocks.abs() / scale).exponent - 1
    half = scale * torch.ldexp(torch.ones_like(blocks), exponents.clamp(min=-6) - 4)
    excess = (dequantize(codes, torch.float64).view_as(blocks) - blocks).abs() / half
    return float(excess.nan_to_num(nan=inf).max())


def _power_of_two(x: Tensor) -> Tensor:
    """Return the smallest power of two that is at least x, for x ≥ 0."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent)).where(
        x > 0, 0
    )


def product_excess(a: Quantized, b: Quantized, out: Tensor) -> float:
    """Return the largest difference of out [n, m] from a bᵀ in fp64, in units of its bound.

    Args:
        a, b: [n, k] and [m, k].
    """
    if not out.numel():
        return 0.0
    left, right = dequantize(a, torch.float64), dequantize(b, torch.float64)
    exact = left @ right.t()
    bound = ACCUMULATION * (left.abs() @ right.abs().t()) + torch.finfo(out.dtype).eps * exact.abs()
    # a term that underflows in fp32 has no bound
    excess = (out.double() - exact).abs() / bound.clamp(min=torch.finfo(torch.float32).tiny)
    return float(excess.nan_to_num(nan=inf).max())


class Fp8Check:
    """Checks each matmul of a rank (`Fp8Observer`).

    Attributes:
        step: the current one, 1-based.
        first: the key by which the first difference is known, and this rank's first one.
        errors: (matrix, product) → largest relative error.
    """

    def __init__(self, trainer: Trainer):
        self.rank, self.step = trainer.mesh.rank, 0
        self.names = [spec.name for spec in fp8_matrices(trainer.config)]
        self.first: tuple[tuple[int, int, int], Fp8Difference] | None = None
        self.errors: dict[tuple[str, str], float] = {}
        self._index: dict[Fp8Matmuls, int] = {}
        for index, name in enumerate(self.names):
            if name in trainer.store.weights:
                matmuls = trainer.store.weights[name].matmuls
                assert isinstance(matmuls, Fp8Matmuls)
                matmuls.observer, self._index[matmuls] = self, index

    def rounded(
        self,
        matmuls: Fp8Matmuls,
        operand: OperandName,
        values: Tensor,
        codes: Quantized,
        groups: Groups | None,
    ) -> None:
        used = len(values) if groups is None else sum(groups.sizes)
        own = Quantized(codes.codes[:used], codes.scales[:used])
        self._note(matmuls, operand, operand, operand_excess(values[:used], own, matmuls.fp8, False))

    def multiplied(
        self,
        matmuls: Fp8Matmuls,
        operand: OperandName,
        values: Tensor,
        codes: Quantized,
        groups: Groups | None,
        out: Tensor,
    ) -> None:
        matrix, weight = matmuls.matrix(), matmuls.quantized()
        weight_codes = weight.along_inputs if operand == "x" else weight.along_outputs
        if matrix is not None:
            matrix = matrix if operand == "x" else matrix.transpose(-1, -2)
            self._note(matmuls, operand, "w", operand_excess(matrix, weight_codes, matmuls.fp8, True))
        sizes = [len(out)] if groups is None else groups.sizes
        worst, difference, norm, start = 0.0, 0.0, 0.0, 0
        for number, size in enumerate(sizes):
            own, part = slice(start, start := start + size), number if groups is not None else slice(None)
            left, right = (
                Quantized(codes.codes[own], codes.scales[own]),
                Quantized(weight_codes.codes[part], weight_codes.scales[part]),
            )
            worst = max(worst, product_excess(left, right, out[own]))
            if matrix is not None:
                exact = (values[own] @ matrix[part].t()).double()
                difference += float((out[own].double() - exact).square().sum())
                norm += float(exact.square().sum())
        self._note(matmuls, operand, None, worst)
        if norm > 0:
            key = (self.names[self._index[matmuls]], PRODUCTS[operand])
            self.errors[key] = max(self.errors.get(key, 0.0), (difference / norm) ** 0.5)

    def _note(self, matmuls: Fp8Matmuls, read: OperandName, operand: str | None, excess: float) -> None:
        """Note a difference if it exceeds its bound and is the first one.

        Args:
            read: the operand that is multiplied with the weight.
        """
        if excess <= (1 if operand is None else NEAREST):
            return
        index = self._index[matmuls]
        key = (self.step, *((0, index) if read == "x" else (1, -index)))
        if self.first is None or key < self.first[0]:
            difference = Fp8Difference(
                self.step, self.names[index], PRODUCTS[read], operand, self.rank, excess
            )
            self.first = key, difference


# ---- two runs


def record(config: Config, steps: int, directory: Path) -> None:
    """Train for `steps` steps and write losses and findings to `directory`. Called by every rank."""
    device = choose_device()
    configure_process(device, config.run.deterministic)
    start_process_group(device, config.run.timeout)
    trainer = Trainer(config, build.make_mesh(config), device)
    check = None if config.train.fp8 == "none" else Fp8Check(trainer)
    for step in range(1, steps + 1):
        if check is not None:
            check.step = step
        result = trainer.step()
        if trainer.mesh.rank == 0:
            (directory / f"step_{step}.json").write_text(json.dumps(result.loss), encoding="utf-8")
    trainer.close()
    if check is not None:
        key, first = check.first or (None, None)
        findings = {
            "key": key,
            "first": first and asdict(first),
            "errors": [[*names, error] for names, error in check.errors.items()],
        }
        (directory / f"rank_{check.rank}.json").write_text(json.dumps(findings), encoding="utf-8")


def compare(directory: Path, plain: Path, steps: int) -> Fp8Comparison:
    """Return the result of two recorded runs, in fp8 and in the compute dtype."""
    losses = [
        (_read(directory / f"step_{step}.json"), _read(plain / f"step_{step}.json"))
        for step in range(1, steps + 1)
    ]
    findings = [_read(file) for file in sorted(directory.glob("rank_*.json"))]
    errors: dict[str, dict[str, float]] = {}
    for matrix, product, error in (entry for each in findings for entry in each["errors"]):
        own = errors.setdefault(matrix, {})
        own[product] = max(own.get(product, 0.0), error)
    first = min((each for each in findings if each["first"]), key=lambda each: each["key"], default=None)
    return Fp8Comparison(losses, errors, Fp8Difference(**first["first"]) if first else None)


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def main() -> None:
    """Run one rank of a recorded run, as `verify.main`."""
    directory = Path(sys.argv[1])
    record(config_in(directory), int(sys.argv[2]), directory)
    shutdown()


if __name__ == "__main__":
    main()
