"""Layers of one block, and blocks beside each other within a layer (`model.layer_blocks`).

The first layers have no attention, and neither has the first of two stages. A computation with plain torch checks what
a layer is; the rest is equal to one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.generation.language_model import LanguageModel
from megalite.huggingface.config_json import to_hf_config
from megalite.model.parameters import model_specs
from megalite.training.verify import global_tensors
from tests.commands.jobs import continued
from tests.distributed.test_equivalence import assert_same_run
from tests.support import jobs, jobs_training
from tests.support.configs import SEQUENCE, config_of, config_of_one_process, write_tokens
from tests.support.jobs import make_trainer
from tests.support.jobs_experts import BASE
from tests.support.pool import RankContext
from tests.support.spaces.space import world

STEPS = 2
LAYERS = ["feed_forward", "mixture", "attention|feed_forward", "feed_forward|attention", "attention", "feed_forward"]
MODEL = {"layer_blocks": LAYERS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODEL |= {"initializer_range": 0.2, "residual_dropout": 0.1, "num_hidden_layers": len(LAYERS)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, split sequence, operations recomputed": {"tp": 2, "sequence_parallel": True, "recompute": "operations"},
    "pp 2, zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "pp 2, interleaved, recomputed within a budget": {"pp": 2, "schedule": "interleaved-3", "recompute": "budget"},
    "tp 2, pp 2, dp 2, zero 2": {"tp": 2, "pp": 2, "dp": 2, "zero": 2, "sequence_parallel": True},
    "dp 2, zero 3, recomputed": {"dp": 2, "zero": 3, "recompute": "full"},
    "cp 2, residual sums recomputed": {"cp": 2, "context": "ring", "recompute": "residual+attn_out+mlp_in"},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def config(prefix: str, **sections: dict[str, Any]) -> dict[str, Any]:
    model = MODEL | sections.pop("model", {})
    return config_of({**BASE, "microbatches": 1}, prefix, "fp64", model=model, **sections)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    case = {**BASE, "layers": len(LAYERS), **LAYOUTS[name]}
    one, several = config_of_one_process(case, prefix), config_of(case, prefix, "fp64", model=MODEL)
    one["model"] |= MODEL
    got = ranks.run(world(case), jobs.train, several, STEPS)
    assert_same_run(got, references.run(jobs.train, one, STEPS), 1e-9, 1e-9)


def test_blocks_beside_each_other_are_parallel_blocks(prefix):
    """With the same bits and stored names, as `parallel_block` shared_norm has them in all layers."""
    dense = {"num_experts": None, "num_hidden_layers": 2}
    shared = config(prefix, model=dense | {"layer_blocks": None, "parallel_block": "shared_norm"})
    listed = config(prefix, model=dense | {"layer_blocks": ["attention | feed_forward"] * 2})
    got, expected = (jobs.train(RankContext(0, 1), each, STEPS) for each in (listed, shared))
    assert got["losses"] == expected["losses"] and got["grad_norms"] == expected["grad_norms"]
    assert got["tensors"].keys() == expected["tensors"].keys()
    assert all(torch.equal(value, expected["tensors"][name]) for name, value in got["tensors"].items())


# ---- plain torch


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def attention(x: Tensor, of: dict[str, Tensor], layer: int) -> Tensor:
    """[seq, hidden], 4 heads of 8 channels that share 2 keys and values, without positions."""
    q, k, v = (x @ of[f"layers.{layer}.attention.{part}.weight"].t() for part in "qkv")
    q, k, v = (each.unflatten(-1, (-1, 8)).transpose(0, 1) for each in (q, k, v))
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = (q @ k.transpose(1, 2)) * 8**-0.5 + torch.full((len(x), len(x)), -torch.inf).triu(1)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ of[f"layers.{layer}.attention.out.weight"].t()


def feed_forward(x: Tensor, of: dict[str, Tensor], layer: int) -> Tensor:
    gate, up, down = (of[f"layers.{layer}.mlp.{part}.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def test_layers_are_what_their_formulas_say(prefix):
    """The output of the last layer, and the gradients of all weights."""
    layers = ["feed_forward", "attention|feed_forward", "attention"]
    plain = {"num_experts": None, "residual_dropout": 0.0, "position": "none", "num_hidden_layers": 3}
    trainer = make_trainer(RankContext(0, 1), config(prefix, model=plain | {"layer_blocks": layers}))
    (stage,), batch = trainer.parts.runtime.stages.values(), trainer.loader.step(0)[0]
    of = {
        name.removeprefix("weight/"): tensor.clone().requires_grad_()
        for name, tensor in global_tensors(trainer).items()
        if not name.startswith(("weight/head", "weight/norm"))
    }
    assert "layers.0.input_norm.weight" not in of and "layers.1.mlp_norm.weight" not in of

    def expected(tokens: Tensor) -> Tensor:
        x = of["embedding.weight"][tokens]
        x = x + feed_forward(normed(x, of["layers.0.mlp_norm.weight"]), of, 0)
        both = normed(x, of["layers.1.input_norm.weight"])
        x = x + attention(both, of, 1) + feed_forward(both, of, 1)
        return x + attention(normed(x, of["layers.2.input_norm.weight"]), of, 2)

    documents = batch.document_start
    batch.document_start = batch.boundaries = None
    trainer.store.reducer.begin_step(1)
    out = stage.trunk(batch.tokens, stage.forward_state(batch, 1, training=True))
    wanted = torch.stack([expected(row) for row in batch.tokens.t()], 1)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    factor = torch.randn_like(out)
    (out * factor).sum().backward()
    (wanted * factor).sum().backward()
    for name, weight in trainer.store.weights.items():
        if name.startswith("layers."):
            grads = [of[segment.name].grad for segment in weight.spec.segments]
            torch.testing.assert_close(weight.grad, torch.cat(grads), rtol=0, atol=1e-11)
    assert documents is not None
    trainer.close()


# ---- other users


def test_initial_weights_count_blocks(prefix):
    """As many as the model has, two in each layer of other models."""

    def deviation(**model: Any) -> float:
        specs = model_specs(from_dict(config(prefix, model=model)).model)
        return next(spec.segments[0].init_std for spec in specs if spec.name.endswith("down.weight"))

    assert deviation() == pytest.approx(0.2 / 8**0.5, rel=1e-12)
    assert deviation(layer_blocks=None) == pytest.approx(0.2 / 12**0.5, rel=1e-12)


def test_generates_from_what_rows_keep_in_every_layout(ranks, prefix):
    """The first stage keeps nothing."""
    saved = jobs_training.train_and_save(RankContext(0, 1), config(prefix, run={"name": "unlike"}), 2, 0)["directory"]
    rows, count = [[5, 3], [7, 11, 13, 17, 19]], 4
    model = LanguageModel(saved, precision="fp64")
    cache = model.new_cache(len(rows), SEQUENCE)
    logits = model.read(cache, rows)
    for step in range(count):
        whole = model.logits(rows)
        assert logits is not None and whole is not None
        for row, tokens in enumerate(rows):
            assert logits[row].allclose(whole[len(tokens) - 1, row], rtol=0, atol=1e-12)
            tokens.append((step * 7 + row) % 90)
        logits = model.extend(cache, [tokens[-1] for tokens in rows], [len(tokens) - 1 for tokens in rows])
    prompts = [[5, 3], [7, 11, 13]]
    alone = continued(RankContext(0, 1), [saved], {}, prompts, count)[0]["greedy"]
    for layout in ({"tp": 2}, {"pp": 2}):
        for (result,) in ranks.run(2, continued, [saved], layout, prompts, count):
            assert result["greedy"] == alone


def test_no_family_has_such_layers(prefix):
    model = from_dict(config(prefix, model={"num_experts": None, "layer_blocks": ["attention"] * 6})).model
    with pytest.raises(ConfigError, match=r"model\.layer_blocks = .* where llama has None"):
        to_hf_config(model, "llama")
