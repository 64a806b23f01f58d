"""Latents that travel over context-parallel ranks, and adapters on their projections, train as on one process.

fp64, 2 steps, within 1e-9: losses, gradient norms and weights. `test_attention.py` has latent attention beside all
other options.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.config.load import from_dict
from megalite.model.blocks.latent_attention.context import latents_travel
from megalite.model.cost.records import Share
from megalite.model.cost.units import Units
from tests.distributed.test_equivalence import assert_same_run
from tests.support import jobs, jobs_context
from tests.support.configs import config_of, config_of_one_process, write_tokens
from tests.support.jobs_experts import BASE
from tests.support.jobs_training import train_with_initial_weights
from tests.support.spaces.attention import LATENTS
from tests.support.spaces.space import world

STEPS = 2
MODEL_OF_4 = {"num_attention_heads": 4, "hidden_size": 32}
LAYOUTS: dict[str, dict[str, Any]] = {
    "in a ring of 3, recomputed, zero 3": {"cp": 3, "context": "ring", "recompute": "full", "zero": 3},
    "gathered, tp 2, named operations recomputed": {
        "cp": 2,
        "context": "gather",
        "tp": 2,
        "recompute": "qkv+attention",
    },
    "in a ring, tp 2, split sequence, zb-v": {
        **{"cp": 2, "context": "ring", "tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-v", "zero": 1}
    },
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    case = {**BASE, **LAYOUTS[name]}
    one, several = config_of_one_process(case, prefix), config_of(case, prefix, "fp64")
    for config in (one, several):
        config["model"] |= LATENTS
    assert_same_run(
        ranks.run(world(case), jobs.train, several, STEPS), references.run(jobs.train, one, STEPS), 1e-9, 1e-9
    )


ADAPTED: dict[str, dict[str, Any]] = {
    "split backward": {"tp": 2, "sequence_parallel": True, "schedule": "zb-h1", "microbatches": 2},
    "latents gathered": {"cp": 2, "context": "gather", "tp": 2, "sequence_parallel": True},
    "latents in a ring": {"cp": 2, "context": "ring"},
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_on_latents_train_like_those_of_one_process(name, ranks, references, prefix):
    """With dropout: the matrices of latents are whole on each rank, the others split; where latents travel, masks are
    of whole rows."""

    def config(**layout: Any) -> dict[str, Any]:
        lora = {"rank": 3, "alpha": 8.0, "dropout": 0.1, "dora": True}
        options = config_of({**BASE, **layout}, prefix, "fp64", lora=lora, optimizer={"lr": 3e-3})
        options["model"] |= LATENTS | {"q_lora_rank": 16}
        return options

    layout = ADAPTED[name]
    expected = references.run(train_with_initial_weights, config(microbatches=1), STEPS)
    world, split = layout.get("cp", 1) * layout.get("tp", 1), config(**{"microbatches": 1, **layout})
    for rank in ranks.run(world, train_with_initial_weights, split, STEPS):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-9, abs=0)


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize(
    "tp, split", [(1, False), (2, False), (2, True)], ids=["whole", "tp 2", "tp 2, split sequence"]
)
def test_bytes_are_those_of_the_formula(method, tp, split, ranks):
    """Both methods send latents and shared keys, of 16 numbers a token; with a split sequence each tp rank those of its
    part of it."""
    sequence, batch, width = 48, 2, LATENTS["kv_lora_rank"] + LATENTS["qk_rope_head_dim"]
    for dtype in (torch.bfloat16, torch.float64):
        part = sequence * width * batch // (tp if split else 1) // 2  # (cp − 1) / cp of all
        expected = [part * dtype.itemsize, part * (dtype.itemsize + max(dtype.itemsize, 4))]
        results = ranks.run(2 * tp, jobs_context.attend_latents, method, tp, split, (sequence, batch, 4), dtype)
        assert [rank["sent"] for rank in results] == [expected] * 2 * tp
    share = Share(sequence // 2, batch, tp, split, cp=2, context=method)
    units = Units(from_dict({"model": {**MODEL_OF_4, **LATENTS}}).model, share)
    ((exchange,), *_) = (block.exchanges for block in units.layer(0).blocks)
    assert exchange.forward * torch.float64.itemsize // 2 == expected[0], "what plans count"


def test_keys_and_values_travel_where_they_are_fewer():
    # with the shared key as many as keys and values
    model = from_dict({"model": {**MODEL_OF_4, **LATENTS, "kv_lora_rank": 68}}).model
    assert not latents_travel(model, "gather", 2, 1, False) and not latents_travel(model, "gather", 2, 2, False)
    narrower = from_dict({"model": {**MODEL_OF_4, **LATENTS, "kv_lora_rank": 67}}).model
    assert latents_travel(narrower, "gather", 2, 1, False) and latents_travel(narrower, "ring", 2, 2, True)
    assert not latents_travel(narrower, "ring", 2, 2, False), (
        "without a split sequence each tp rank would send all latents"
    )
    assert not latents_travel(narrower, "ulysses", 2, 1, False) and not latents_travel(narrower, "gather", 1, 1, False)


def test_plans_count_the_products_with_latents_of_other_ranks():
    model = from_dict({"model": {**MODEL_OF_4, **LATENTS}}).model

    def rows(method: str) -> int:
        units = Units(model, Share(24, 2, cp=4, context=method))
        return next(product.rows for product in units.layer(0).matmuls if product.name == "attention.kv_b")

    assert (rows("ulysses"), rows("gather"), rows("ring")) == (48, 4 * 48, 4 * 48)
