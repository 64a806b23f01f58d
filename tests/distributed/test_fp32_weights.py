"""Weights that stay in fp32 whatever the compute precision is (`ParamSpec.at_least_fp32`), in every layout.

A kind of block that these tests define has two of them (`tests.support.decaying_convolution`). The planner's memory and
traffic with them are checked with those of other models (`tests.planner.test_memory`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalite.checkpoint.manifest import Manifest
from megalite.config.load import from_dict
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.sharding import offload
from megalite.planner.memory.states import checkpoint_bytes
from megalite.training.trainer import Trainer
from tests.distributed.test_equivalence import assert_same_run
from tests.support import decaying_convolution, short_convolution
from tests.support.configs import case_of, config_of, config_of_one_process, write_tokens
from tests.support.decaying_convolution import KIND, DecayingConvolutionKind
from tests.support.pool import RankContext

STEPS = 4
MODEL = {"layer_blocks": [f"{KIND}+feed_forward", "attention+feed_forward"] * 2, "initializer_range": 0.2}
BASE = case_of(tied=False, kv_heads=2, vocab_size=96, layers=4, masked=True, dropout=0.0, precision="fp64")
FP32, FP64 = (["a_log torch." + dtype, "dt_bias torch." + dtype] for dtype in ("float32", "float64"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2, "sequence_parallel": True},
    "pp 2, optimistic steps": {"pp": 2, "schedule": "zb-v", "microbatches": 4, "ema": True},
    "dp 2, zero 1": {"dp": 2, "zero": 1, "ema": True},
    "dp 2, zero 2": {"dp": 2, "zero": 2, "microbatches": 2},
    "groups, zero 3": {"dp": 4, "zero": 3, "dp_shard": 2, "microbatches": 2},
}
PLACES: dict[str, dict[str, Any]] = {
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "offloaded": {"zero": 3, "offload": "disk", "offload_parameters": True},
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with short_convolution.registered(DecayingConvolutionKind()):
        yield


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def config(prefix: str, precision: str, **layout: Any) -> dict[str, Any]:
    case = {**BASE, **layout}
    parallel = {name: layout[name] for name in ("dp_shard", "offload", "offload_parameters") if name in layout}
    return config_of(case, prefix, precision, model=MODEL, parallel=parallel)


def world(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    layout = LAYOUTS[name]
    one = config_of_one_process({**BASE, **layout}, prefix)
    one["model"] |= MODEL
    kinds = ("weight", "ema") if layout.get("ema") else ("weight",)
    expected = references.run(decaying_convolution.train, one, STEPS, kinds)
    got = ranks.run(world(layout), decaying_convolution.train, config(prefix, "fp64", **layout), STEPS, kinds)
    assert_same_run(got, expected, 1e-9, 1e-9)
    assert all(rank["seen"] == FP64 for rank in (*got, expected))


@pytest.mark.parametrize("place", PLACES)
def test_bf16_ranks_train_like_one_process_in_bf16(place, ranks, references, prefix):
    """To the last bit: two ranks add their gradients as one process adds those of two microbatches."""
    alone, several = (config(prefix, "bf16", **each) for each in ({"microbatches": 2}, {"dp": 2, **PLACES[place]}))
    for each in (alone, several):
        each["train"]["grad_clip"] = 0.0  # the norm is summed in parts
    expected = references.run(decaying_convolution.train, alone, STEPS)
    got = ranks.run(2, decaying_convolution.train, several, STEPS)
    assert all((rank["losses"], rank["seen"]) == (expected["losses"], FP32) for rank in got)
    assert all(tensor.equal(expected["tensors"][name]) for name, tensor in got[0]["tensors"].items())


@pytest.mark.parametrize(
    "layout, bound",
    [({"tp": 2}, 1e-3), ({"pp": 2, "schedule": "zb-h2", "microbatches": 4}, 1e-6)],
    ids=["tp 2", "pp 2, optimistic steps"],
)
def test_bf16_models_in_parts_keep_them_in_fp32(layout, bound, ranks, references, prefix):
    """Partial sums of tp are rounded to bf16, stages compute as one process does."""
    alone = config(prefix, "bf16", microbatches=layout.get("microbatches", 1))
    expected = references.run(decaying_convolution.train, alone, STEPS)
    for rank in ranks.run(2, decaying_convolution.train, config(prefix, "bf16", **layout), STEPS):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=bound, abs=0) and rank["seen"] == FP32


def test_resumes_on_another_layout(ranks, prefix):
    """What a checkpoint keeps of weights that are their own masters, and of their moments."""
    first = config(prefix, "bf16", dp=2, zero=1)
    first["run"]["name"] = "resumed"
    whole = ranks.run(2, decaying_convolution.train_and_save, first, 2, 2)
    other = config(prefix, "bf16", dp=2, zero=3)
    other["checkpoint"]["load"] = whole[0]["directory"]
    got = ranks.run(2, decaying_convolution.resume, other, 2)
    assert [rank["losses"] for rank in got] == [rank["losses"][2:] for rank in whole]
    assert all(tensor.equal(whole[0]["tensors"][name]) for name, tensor in got[0]["tensors"].items())


def test_frozen_ones_stay_in_fp32_and_are_saved_so(prefix):
    frozen = config(prefix, "bf16")
    frozen["run"]["name"], frozen["lora"] = "frozen", {"rank": 2, "targets": ["q"]}
    result = decaying_convolution.train_and_save(RankContext(0, 1), frozen, 1, 0, ("weight",))
    stored = Manifest.of(Path(result["directory"])).tensors
    assert result["seen"] == FP32
    assert [stored[f"weight/layers.0.attention.{name}"].dtype for name in ("a_log", "out.weight")] == [
        "float32",
        "bfloat16",
    ]
    sizes = (math.prod(each.shape) * getattr(torch, each.dtype).itemsize for each in stored.values())
    assert sum(sizes) == checkpoint_bytes(from_dict(frozen))


@pytest.mark.gpu
def test_offloading_from_a_gpu_copies_weights_of_two_dtypes(prefix):
    losses = []
    for place in ("none", "cpu"):
        trainer = Trainer(from_dict(config(prefix, "bf16", offload=place)), Mesh(Layout()), "cuda:0")
        with patch.object(offload, "WINDOW", 4096):
            losses.append([trainer.step().loss for _ in range(STEPS)])
        trainer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
