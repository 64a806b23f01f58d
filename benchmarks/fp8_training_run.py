"""One training run of `fp8_training`: `python -m benchmarks.fp8_training_run SPEC.json`.

The run computes in fp32. Matmuls of the matrices of layers have rounded operands, and fp32 sums:

    run      forward, input gradient    weight gradient
    bf16     bf16                       bf16
    block    fp8 (`train.fp8`)          bf16
    mxfp8    fp8 (`train.fp8`)          bf16

The matrices are those that multiply in fp8 with `train.fp8`, in every run. All other operations, embedding
and head included, are those of an fp32 run. An interrupted run resumes from its last checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import finish, read_spec
from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.launch.process import configure_process, start_process_group
from megalite.parallel.fp8_choice import fp8_choice
from megalite.parallel.matmuls import Matmuls
from megalite.parallel.weight import Weight
from megalite.training.fit import fit
from megalite.training.trainer import Trainer

Operands = Literal["bf16", "block", "mxfp8"]


class Bf16OperandMatmuls(Matmuls):
    """Matmuls in fp32 of operands that are rounded to bf16."""

    adds_residual = False

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(_rounded(x), _rounded(self.tensor), bias)

    def input_gradient(self, grad: Tensor) -> Tensor:
        return torch.matmul(_rounded(grad), _rounded(self.tensor))


def round_operands(trainer: Trainer, operands: Operands) -> int:
    """Round the operands of the matrices of layers. Return the number of these matrices.

    Args:
        operands: what forward and input gradient multiply; fp8 is that of the trainer's configuration.
    """
    config = trainer.config
    recipe = "block" if operands == "bf16" else operands
    train, layers = replace(config.train, fp8=recipe), config.model.num_hidden_layers
    at, weights = trainer.mesh.coordinates, trainer.store.weights.values()
    chosen = [each for each in weights if fp8_choice(each.spec, at, train, layers).rows]
    for weight in chosen:
        if operands == "bf16":
            weight.matmuls = Bf16OperandMatmuls(weight.tensor)
        # the only door to the weight gradient, which has no other format in the library
        weight.add_matmul = partial(_add_rounded, weight)  # type: ignore[method-assign]
    return len(chosen)


def _add_rounded(weight: Weight, grad_output: Tensor, inputs: Tensor, groups: Any) -> None:
    Weight.add_matmul(weight, _rounded(grad_output), _rounded(inputs), groups)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def main() -> None:
    spec = read_spec()
    config = from_dict(spec["config"])
    device = torch.device("cpu")
    torch.set_num_threads(spec["threads"])
    configure_process(device)
    start_process_group(device, config.run.timeout)
    torch.set_float32_matmul_precision("highest")  # fp32 sums of fp32 products
    trainer = Trainer(config, build.make_mesh(config), device)
    matrices = round_operands(trainer, spec["operands"])
    fit(trainer)
    trainer.close()
    finish(spec, {"matrices": matrices, "parameters": trainer.parameters})


if __name__ == "__main__":
    main()
