"""Attention with a gate on its output: transformers' layer, and every layout against one process.

The gate's rows of transformers' q_proj follow the query's, head by head; ours are a segment of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.load import from_dict
from megalite.config.sections.model import ModelConfig
from megalite.generation.language_model import LanguageModel
from megalite.model.block_module import BlockModule
from megalite.model.blocks.attention.rotary import RotaryInputs
from megalite.model.cost.records import Share
from megalite.model.forward_state import ForwardState
from megalite.model.kinds import KINDS, blocks_of
from megalite.model.layer_options import LayerOptions
from megalite.model.parameters import layer_specs
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.weight import Weight
from megalite.parallel.weight_grad_queue import WeightGradQueue
from tests.distributed.test_equivalence import assert_trains_like_one_process
from tests.support import jobs_training
from tests.support.configs import SEQUENCE, config_of, write_tokens
from tests.support.jobs import mesh_of
from tests.support.jobs_experts import BASE
from tests.support.jobs_training import train_with_initial_weights
from tests.support.pool import RankContext

STEPS = 2
GATED = {"attention_gate": True, "qk_norm": "head", "partial_rotary_factor": 0.5, "initializer_range": 0.2}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # layout, model
    "tp 4, copied keys, zero 3": ({"tp": 4, "dp": 2, "zero": 3}, {}),
    "tp 2, split sequence, zb-v, biases": (
        {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-v"},
        {"attention_bias": True, "qk_norm": "full"},
    ),
    "gathered, operations recomputed": (
        {"cp": 2, "context": "gather", "recompute": "qkv+attention+residual"},
        {"qk_norm": "none"},
    ),
    "a ring, window, recomputed": ({"cp": 2, "context": "ring", "recompute": "full"}, {"sliding_window": 5}),
    "ulysses, tp 2, operations recomputed": (
        {"cp": 2, "context": "ulysses", "tp": 2, "sequence_parallel": True, "recompute": "qkv+attention"},
        {},
    ),
    "parallel blocks, output recomputed": (
        {"tp": 2, "recompute": "attn_out+attn_norm"},
        {"parallel_block": "two_norms", "mtp_layers": 1},
    ),
    "Muon, recomputed within a budget": ({"dp": 2, "optimizer": "muon", "recompute": "budget"}, {}),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    layout, model = LAYOUTS[name]
    assert_trains_like_one_process(ranks, references, {**BASE, **layout}, prefix, GATED | model, STEPS)


def test_its_matrix_has_an_adapter(ranks, references, prefix):
    def config(**layout: Any) -> dict[str, Any]:
        lora = {"rank": 3, "dropout": 0.1, "targets": ["q", "attention_gate", "o"]}
        return config_of({**BASE, "microbatches": 1, **layout}, prefix, "fp64", lora=lora, model=GATED)

    expected = references.run(train_with_initial_weights, config(), STEPS)
    layout = {"tp": 2, "sequence_parallel": True, "recompute": "operations"}
    got = ranks.run(2, train_with_initial_weights, config(**layout), STEPS)[0]
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
    assert got["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-9, abs=0)
    assert expected["tensors"]["weight/layers.0.attention.gate.lora_b"].abs().max() > 0


def test_generates_from_what_rows_keep(prefix):
    config = config_of({**BASE, "microbatches": 1}, prefix, "fp64", model=GATED, run={"name": "gated"})
    saved = jobs_training.train_and_save(RankContext(0, 1), config, 2, 0)["directory"]
    rows = [[5, 3], [7, 11, 13, 17, 19]]
    model = LanguageModel(saved, precision="fp64")
    cache = model.new_cache(len(rows), SEQUENCE)
    logits = model.read(cache, rows)
    for step in range(3):
        whole = model.logits(rows)
        assert logits is not None and whole is not None
        for row, tokens in enumerate(rows):
            assert logits[row].allclose(whole[len(tokens) - 1, row], rtol=0, atol=1e-12)
            tokens.append((step * 7 + row) % 90)
        logits = model.extend(cache, [tokens[-1] for tokens in rows], [len(tokens) - 1 for tokens in rows])


# ---- transformers


HIDDEN, HEADS, KV, DIM, ROTATING = 32, 4, 2, 16, 4


def block_and_weights(model: ModelConfig, dtype: torch.dtype) -> tuple[BlockModule, dict[str, Weight]]:
    """Attention of the first layer, and its weights with gradients of one microbatch."""
    weights = {}
    for spec in layer_specs(model, 0, 1):
        shape = (sum(segment.shape[0] for segment in spec.segments), *spec.segments[0].shape[1:])
        weight = Weight(spec, torch.zeros(shape, dtype=dtype).requires_grad_(), dtype, WeightGradQueue())
        weight.grad = torch.full(shape, torch.nan, dtype=dtype)
        weight.begin_step(1, 1)
        weights[spec.name] = weight
    options = LayerOptions(False, "none", "all_to_all", Share(1), CompiledOps())
    mesh = mesh_of(RankContext(0, 1), from_dict({"parallel": {"dp": 1}}))
    block = blocks_of(model, 0)[0]
    return KINDS[block.kind].make(model, block, weights, mesh, options), weights


def our_channels() -> Tensor:
    """Their channel of each of ours: they rotate the first ones among themselves, we rotate halves of the head."""
    first, second, rest = torch.arange(ROTATING).chunk(2) + (torch.arange(ROTATING, DIM),)
    plain = rest.chunk(2)
    return torch.cat((first, plain[0], second, plain[1]))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)], ids=str)
def test_is_the_layer_of_transformers(dtype, tolerance):
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": ROTATING / DIM}
    heads = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM}
    config = Qwen3NextConfig(**heads, rope_parameters=rope, num_hidden_layers=1, attn_implementation="eager")
    theirs = Qwen3NextAttention(config, 0).to(dtype)
    with torch.no_grad():
        for value in theirs.parameters():
            value.copy_(torch.randn_like(value) * (0.3 if value.dim() == 1 else 1.0))
    model = ModelConfig(**heads, attention_gate=True, qk_norm="head", norm_offset=1.0, rms_norm_eps=1e-6)
    model.partial_rotary_factor = ROTATING / DIM
    block, weights = block_and_weights(model, dtype)

    order = our_channels()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, gate = q.view(HEADS, 2, DIM, HIDDEN).unbind(1)
        key = k.view(KV, DIM, HIDDEN)[:, order]
        return torch.cat((query[:, order].flatten(0, 1), key.flatten(0, 1), v, gate.flatten(0, 1)))

    matrices = [getattr(theirs, f"{name}_proj").weight for name in "qkv"]
    expected = {
        "qkv": lambda of: ours(*map(of, matrices)),
        "out": lambda of: of(theirs.o_proj.weight),
        "q_norm": lambda of: of(theirs.q_norm.weight)[order],
        "k_norm": lambda of: of(theirs.k_norm.weight)[order],
    }
    for name, tensor in expected.items():
        weights[f"layers.0.attention.{name}.weight"].tensor.data.copy_(tensor(lambda each: each.detach()))

    x, grad = (torch.randn(2, 13, HIDDEN, dtype=dtype) for _ in range(2))  # [batch, seq, hidden]
    x_of_theirs, x_of_ours = x.clone().requires_grad_(), x.transpose(0, 1).contiguous().requires_grad_()
    mask = torch.full((13, 13), -torch.inf, dtype=dtype).triu(1)[None, None]
    tables = Qwen3NextRotaryEmbedding(config)(x, torch.arange(13)[None])
    wanted = theirs(x_of_theirs, tables, mask)[0]
    wanted.backward(grad)

    positions = torch.arange(13).unsqueeze(1)
    state = ForwardState(torch.arange(2), 0, 0, True, positions, segments=((0, 13),))
    RotaryInputs(model, dtype)(state)
    out = block(x_of_ours, state)
    out.backward(grad.transpose(0, 1).contiguous())

    def close(name: str, got: Tensor | None, wanted: Tensor | None) -> None:
        assert got is not None and wanted is not None
        assert (got - wanted).abs().max() <= tolerance * wanted.abs().max(), name

    close("output", out.transpose(0, 1), wanted)
    close("dx", x_of_ours.grad.transpose(0, 1), x_of_theirs.grad)
    for name, tensor in expected.items():
        close(name, weights[f"layers.0.attention.{name}.weight"].grad, tensor(lambda each: each.grad))
