"""One training run of `fp8_training`: `python -m benchmarks.fp8_training_run SPEC.json`.

The run computes in fp32. Matmuls of the matrices of layers have rounded operands, and fp32 sums:

    run      forward, input gradient    weight gradient
    bf16     bf16                       bf16
    block    fp8 (`train.fp8`)          bf16
    mxfp8    fp8 (`train.fp8`)          bf16
    fp32     fp32                       fp32

The matrices are those that multiply in fp8 with `train.fp8`, in every run. All other operations, embedding
and head included, are those of an fp32 run. An interrupted run resumes from its last checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import finish, read_spec
from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.launch.process import configure_process, start_process_group
from megalite.parallel.fp8_choice import Fp8Options, fp8_choice
from megalite.parallel.matmuls import Matmuls
from megalite.training.fit import fit
from megalite.training.trainer import Trainer

if TYPE_CHECKING:
    from megalite_kernels.groups import Groups

    from megalite.parallel.matmuls import Operand

Operands = Literal["bf16", "block", "mxfp8", "fp32"]


class Bf16Operands(Matmuls):
    """Matmuls in fp32 of operands that are rounded to bf16."""

    adds_residual = False

    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        return F.linear(_rounded(x), _rounded(self.tensor), bias)

    def input_gradient(self, grad: Operand) -> Tensor:
        return torch.matmul(_rounded(grad), _rounded(self.tensor))


class Bf16WeightGradients(Matmuls):
    """Forward and input gradient of other matmuls, and weight gradients of operands rounded to bf16."""

    adds_residual = False

    def __init__(self, others: Matmuls):
        super().__init__(others.tensor)
        self.others = others

    def forward(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        return self.others.forward(x, bias)

    def input_gradient(self, grad: Operand) -> Tensor:
        return self.others.input_gradient(grad)

    def add_weight_gradient(
        self, grad: Tensor, grad_output: Tensor, inputs: Operand, groups: Groups | None, overwrite: bool
    ) -> None:
        super().add_weight_gradient(grad, _rounded(grad_output), _rounded(inputs), groups, overwrite)


def round_operands(trainer: Trainer, operands: Operands) -> int:
    """Round the operands of the matrices of layers. Return the number of these matrices.

    Args:
        operands: what forward and input gradient multiply; fp8 is that of the trainer's configuration.
    """
    if operands == "fp32":
        return 0
    options = Fp8Options("block" if operands == "bf16" else operands)
    layers, at = trainer.config.model.num_hidden_layers, trainer.mesh.coordinates
    weights = trainer.store.weights.values()
    chosen = [each for each in weights if fp8_choice(each.spec, at, options, layers).rows]
    for weight in chosen:
        own = Bf16Operands(weight.tensor) if operands == "bf16" else weight.matmuls
        weight.matmuls = Bf16WeightGradients(own)
    return len(chosen)


def _rounded(x: Operand) -> Tensor:
    assert isinstance(x, Tensor)
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
