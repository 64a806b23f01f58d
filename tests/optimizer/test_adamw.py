"""AdamW over flat shards, and the gradient norm, against torch on ordinary parameters."""

import pytest
import torch

from megalite.config.sections.model import ModelConfig
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.mesh.mesh import Layout, Mesh
from megalite.model.parameters import model_specs
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.norm import clip_divisor
from megalite.optimizer.registry import OPTIMIZERS
from megalite.optimizer.state import OptimizerState
from megalite.parallel.sharding.store import ParameterStore, StoreOptions
from megalite.parallel.spec import ParamSpec, Segment
from tests.optimizer.norms import total_norm

OPTIONS = OptimizerConfig(lr=0.02, betas=[0.8, 0.97], eps=1e-6, weight_decay=0.3)
MODEL = ModelConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, norm="layer", attention_bias=True
)


def make_store(specs, dtype=torch.float64, seed=1):
    store = ParameterStore(specs, Mesh(Layout()), StoreOptions(dtype=dtype, bucket_bytes=3e3))
    store.initialize(seed)
    return store


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_are_those_of_torch_with_clipping_and_decay_groups(dtype):
    """One group of matrices that decay and one of biases and norms that do not; gradients clipped in some steps and not
    in others."""
    store = make_store(model_specs(MODEL), dtype)
    ours = AdamW(OptimizerState(store, OPTIMIZERS["adamw"].tensors()), OPTIONS)
    parameters = {name: weight.tensor.detach().clone().requires_grad_() for name, weight in store.weights.items()}
    groups = [
        {
            "params": [value for value in parameters.values() if (value.dim() > 1) is decays],
            "weight_decay": 0.3 * decays,
        }
        for decays in (True, False)
    ]
    theirs = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.97), eps=1e-6)
    generator = torch.Generator().manual_seed(5)
    norms = []
    for step in range(1, 7):
        for name, weight in store.weights.items():
            gradient = torch.randn(weight.tensor.shape, generator=generator).to(dtype) * (3.0 if step % 2 else 0.01)
            weight.grad.copy_(gradient)
            parameters[name].grad = gradient
        rate = 0.02 / step
        measured, _ = total_norm(store, store.mesh)
        norms.append(measured.item())
        assert torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item() == pytest.approx(norms[-1], rel=1e-6)
        ours.step(step, rate, clip_divisor(measured, 1.0))
        store.publish()
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
    for name, value in parameters.items():
        torch.testing.assert_close(store.weights[name].tensor.detach(), value.detach(), rtol=0, atol=2e-7, msg=name)
    assert min(norms) < 1 < max(norms)


def test_clipping_only_ever_shrinks():
    norm = torch.tensor(4.0, dtype=torch.float64)
    assert clip_divisor(norm, 2.0).item() == pytest.approx(2.0)
    assert clip_divisor(norm, 8.0).item() == 1.0
    assert clip_divisor(norm, 0.0) is None


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_norm_of_25_million_elements_keeps_its_digits(scale):
    """torch's vector_norm, one running sum in fp32, loses the third digit here; the reference is fp64 over the same
    values."""
    store = make_store([ParamSpec("w", 0, (Segment("w", (5000, 5000)),))], torch.float32)
    gradient = store.weights["w"].grad
    gradient.normal_(generator=torch.Generator().manual_seed(0)).add_(1.0).mul_(scale)
    exact = gradient.double().square().sum().sqrt().item()
    assert total_norm(store, store.mesh)[0].item() == pytest.approx(exact, rel=1e-7)
    running = torch.linalg.vector_norm(gradient.flatten()).item()
    assert abs(running - exact) / exact > 1e-5, "these values do not show the trap"


def test_other_numbers_travel_with_the_norm():
    store = make_store(model_specs(MODEL))
    for weight in store.weights.values():
        weight.grad.fill_(2.0)
    norm, others = total_norm(store, store.mesh, [1.5, torch.tensor(2.5)])
    elements = sum(weight.tensor.numel() for weight in store.weights.values())
    assert norm.item() == pytest.approx(2.0 * elements**0.5) and others.tolist() == [1.5, 2.5]
