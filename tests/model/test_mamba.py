"""Mamba blocks against the definition of Mamba-2, one token after the other, in fp64: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.assembly.parts import make_mesh
from megalite.config.load import from_dict
from megalite.config.sections.model import ModelConfig
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 2, "masked": True, "dropout": 0.0}
BETA = 0.9
SIZES = {"mamba_num_heads": 4, "mamba_head_dim": 6, "mamba_state_size": 5, "mamba_n_groups": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gate first, limited steps": {"mamba_time_step_limit": [0.004, 0.05]},
    "norm first, one group, biases": {"mamba_norm": "norm_first", "mamba_n_groups": 1, "mamba_proj_bias": True},
    "multipliers, no norm, no bias": {
        "mamba_norm": "none",
        "mamba_conv_bias": False,
        "mamba_conv_kernel": 3,
        "mamba_multipliers": [0.5, 1.5, 0.7, 1.2, 0.8],
        "mamba_in_multiplier": 1.3,
        "mamba_out_multiplier": 0.6,
    },
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), CASE["vocab_size"])


def rms(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def mamba(u: Tensor, starts: Tensor, model: ModelConfig, own: dict[str, Tensor]) -> Tensor:
    """The block's output, [seq, batch, hidden]."""
    heads, width, size = model.mamba_num_heads, model.mamba_head_dim, model.mamba_state_size
    groups, taps = model.mamba_n_groups, model.mamba_conv_kernel
    factors = dict(zip(("z", "x", "B", "C", "dt"), model.mamba_multipliers or [1.0] * 5, strict=True))
    part = {
        name: F.linear(u * model.mamba_in_multiplier, own[f"{name}.weight"], own.get(f"{name}.bias")) * factor
        for name, factor in factors.items()
    }
    delta = F.softplus(part["dt"] + own["dt_bias"])
    if model.mamba_time_step_limit is not None:
        delta = delta.clamp(*model.mamba_time_step_limit)
    seq, batch = starts.shape
    outputs = []
    for row in range(batch):
        state = u.new_zeros(heads, size, width)
        for token in range(seq):
            first = int(starts[token, row])
            if token == first:
                state = torch.zeros_like(state)
            seen = range(max(first, token - taps + 1), token + 1)
            convolved = {}
            for name in ("x", "B", "C"):
                weight, bias = own[f"conv_{name}.weight"], own.get(f"conv_{name}.bias")
                summed = sum(weight[:, taps - 1 - token + at] * part[name][at, row] for at in seen)
                convolved[name] = F.silu(summed if bias is None else summed + bias)
            x = convolved["x"].view(heads, width)
            b, c = (convolved[name].view(groups, size).repeat_interleave(heads // groups, 0) for name in "BC")
            step = delta[token, row]
            decay = torch.exp(-step * own["a_log"].exp())
            state = decay[:, None, None] * state + step[:, None, None] * b[:, :, None] * x[:, None]
            outputs.append((c[:, :, None] * state).sum(1) + own["d"][:, None] * x)
    y = torch.stack(outputs).view(batch, seq, heads * width).transpose(0, 1)
    gate, grouped = F.silu(part["z"]), (*y.shape[:2], groups, -1)
    if model.mamba_norm == "none":
        y = y * gate
    elif model.mamba_norm == "gate_first":
        y = rms((y * gate).view(grouped), model.rms_norm_eps).flatten(2) * own["norm.weight"]
    else:
        y = rms(y.view(grouped), model.rms_norm_eps).flatten(2) * own["norm.weight"] * gate
    return F.linear(y, own["out.weight"], own.get("out.bias")) * model.mamba_out_multiplier


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_a_recursion_over_tokens(name: str, prefix: str) -> None:
    options = {**SIZES, "layer_blocks": ["mamba"] * 2, "initializer_range": 0.3, "position": "none", **MODELS[name]}
    config = from_dict(config_of(CASE, prefix, "fp64", model=options, optimizer={"betas": [BETA, 0.95]}))
    config.train.global_batch_size = config.train.micro_batch_size = 2
    config.train.grad_clip = 0.0
    trainer = Trainer(config, make_mesh(config))
    with torch.no_grad():  # no weight starts at 0 or 1
        generator = torch.Generator().manual_seed(3)
        for weight in trainer.store.weights.values():
            weight.tensor.add_(torch.randn(weight.tensor.shape, generator=generator, dtype=torch.float64), alpha=0.2)
    weights = {key.removeprefix("weight/"): value.requires_grad_() for key, value in global_tensors(trainer).items()}
    (batch,) = trainer.loader.step(0)
    result = trainer.step()
    ours = global_tensors(trainer, ("exp_avg",))
    trainer.close()

    assert batch.document_start is not None and int(batch.document_start.max()) > 0
    x = weights["embedding.weight"][batch.tokens]
    for layer in range(2):
        prefix_of = f"layers.{layer}.mixer."
        own = {key.removeprefix(prefix_of): value for key, value in weights.items() if key.startswith(prefix_of)}
        normed = rms(x, config.model.rms_norm_eps) * weights[f"layers.{layer}.input_norm.weight"]
        x = x + mamba(normed, batch.document_start, config.model, own)
    logits = F.linear(rms(x, config.model.rms_norm_eps) * weights["norm.weight"], weights["head.weight"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-13)
    for key, value in weights.items():
        assert value.grad is not None
        torch.testing.assert_close(ours[f"exp_avg/{key}"] / (1 - BETA), value.grad, rtol=0, atol=1e-12, msg=key)
