"""Training by replayed graphs is training without them, bit for bit: losses, norms, weights and both moments.

On a CPU a graph is a list of operations (`tests.support.operation_graphs`), which executes no more Python than a CUDA
graph. The loss is masked, so that its scale differs between steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import operation_graphs
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces.layouts import Case

STEPS = 4
MODEL = {"tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 4, "masked": True, "dropout": 0.0}
Passes = dict[tuple[int, int], int]
"""The number of passes by stage and slot, since the graphs were recorded."""
CASES: dict[str, tuple[Case, dict[str, Any], list[Passes]]] = {
    "one microbatch, both ends of the model on a rank": (
        {"tied": True, "schedule": "interleaved-2"},
        {},
        [{(0, 0): 6, (1, 0): 6}],
    ),
    "four microbatches, loss in chunks": ({"microbatches": 4}, {"loss_chunk": 8}, [{(0, 0): 24}]),
    "all in flight, tied, deterministic": (
        {"microbatches": 3, "schedule": "gpipe", "tied": True, "deterministic": True},
        {"loss_chunk": 8},
        [{(0, 0): 6, (0, 1): 6, (0, 2): 6}],
    ),
    "more microbatches in later steps": (
        {"microbatches": 3},
        {"rampup_batch_size": [1, 1, 4]},  # 1, 1, 2, 3: the first and the third run eagerly
        [{(0, 0): 6}],
    ),
    "two stages": ({"pp": 2, "microbatches": 5, "tied": True}, {}, [{(0, 0): 18, (0, 1): 12}, {(1, 0): 30}]),
    "virtual stages, ZeRO-1, recomputation": (
        {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2, "schedule": "interleaved-2", "recompute": "operations"},
        {"precision": "bf16"},
        [{(0, 0): 6, (0, 1): 6, (2, 0): 6, (2, 1): 6}] * 2 + [{(1, 0): 6, (1, 1): 6, (3, 0): 12}] * 2,
    ),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


@pytest.mark.parametrize("name", CASES)
def test_replays_train_like_the_eager_step(name: str, ranks, prefix: str) -> None:
    options, train, passes = CASES[name]
    case = {**SINGLE, **MODEL, **options}
    run = {"deterministic": options.get("deterministic", False)}
    config = config_of(case, prefix, validation={"batches": 1}, run=run)
    config["data"] |= {"reset_positions": False, "validation": 0.1}
    config["train"] |= {"micro_batch_size": 1, "global_batch_size": case["microbatches"] * case["dp"], **train}
    world = case["pp"] * case["dp"]
    eager = ranks.run(world, operation_graphs.train, config, STEPS)
    config["train"]["graphs"] = True
    replayed = ranks.run(world, operation_graphs.train, config, STEPS)
    assert [rank["replays"] for rank in replayed] == passes
    for one, other in zip(eager, replayed, strict=True):
        for key in ("losses", "grad_norms", "validation"):
            assert one[key] == other[key], key
    for tensor, value in eager[0]["tensors"].items():
        assert torch.equal(value, replayed[0]["tensors"][tensor]), tensor
