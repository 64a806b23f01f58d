"""The norms' autograd Functions: the residual addition fused with a norm, and gradients of gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megalite_kernels import norm as kernels
from torch import Tensor

from megalite.assembly.parts import make_mesh
from megalite.config.load import from_dict
from megalite.mesh.mesh import MeshAxis
from megalite.model import by_operation
from megalite.model.by_operation import add_and_norm
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.tensor.head_norms import FullWidthRMSNorm
from megalite.parallel.tensor.norm import LayerNorm, RMSNorm
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 2, "masked": False, "dropout": 0.0}
FUSED = {
    "pre": {},
    "bf16": {"train": {"precision": "bf16"}},
    "both, offset": {"model": {"norm_placement": "both", "norm_offset": 1.0}, "train": {"precision": "bf16"}},
    "dropout, recomputed": {"model": {"residual_dropout": 0.2}, "train": {"recompute": "full"}},
}
UNFUSED = {"post": {"model": {"norm_placement": "post"}}, "layer norm": {"model": {"norm": "layer"}}}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), CASE["vocab_size"])


def plain_addition(x: Tensor, branch: Tensor, norm: torch.nn.Module) -> tuple[Tensor, Tensor]:
    total = x + branch
    return total, norm(total)


@pytest.mark.parametrize("name", [*FUSED, *UNFUSED])
def test_the_fused_addition_trains_to_the_same_bits(name, prefix, monkeypatch):
    calls, fused = [], kernels.add_rms_norm
    monkeypatch.setattr(kernels, "add_rms_norm", lambda *args: calls.append(name) or fused(*args))

    def train() -> tuple[list[float], dict[str, Tensor]]:
        config = from_dict(config_of(CASE, prefix, **(FUSED | UNFUSED)[name]))
        trainer = Trainer(config, make_mesh(config))
        stage = trainer.parts.runtime.stages[0]
        stage.joined = stage.single
        for each in stage.layers.values():
            each.nodes = []
        losses = [trainer.step().loss for _ in range(3)]
        tensors = {key: value.clone() for key, value in global_tensors(trainer).items()}
        trainer.close()
        return losses, tensors

    losses, tensors = train()
    assert bool(calls) == (name in FUSED)
    monkeypatch.setattr(by_operation, "add_and_norm", plain_addition)
    expected_losses, expected = train()
    assert losses == expected_losses
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[key], expected[key]) for key in expected)


class Weight(SimpleNamespace):
    """As much of a Weight as a norm asks for."""

    def accumulate(self, value: Tensor) -> None:
        self.grad = value


def weight() -> Weight:
    return Weight(tensor=torch.randn(8), spec=SimpleNamespace(segments=[SimpleNamespace(shape=(8,), replicas=1)]))


@pytest.mark.parametrize("kind", ["rms", "add and rms", "layer", "full width"])
def test_a_gradient_of_a_gradient_raises(kind):
    x = torch.randn(3, 8, requires_grad=True)
    rms = RMSNorm(weight(), 1e-5, 0.0, True, CompiledOps())
    full = FullWidthRMSNorm(weight(), 1e-5, 0.0, True, MeshAxis("tp", 0, 1, (0,)))
    functions = {
        "rms": rms,
        "add and rms": lambda x: add_and_norm(x, 2 * x, rms)[1],
        "layer": LayerNorm(weight(), weight(), 1e-5, 0.0, CompiledOps()),
        "full width": lambda x: full(x.unflatten(-1, (2, 4))),
    }
    with pytest.raises(RuntimeError, match="once_differentiable|gradients of gradients"):
        (dx,) = torch.autograd.grad(functions[kind](x).square().sum(), x, create_graph=True)
        dx.square().sum().backward()
