"""What one step communicates is what the design says, to the last message, and nothing communicates besides.

The mesh counts what megalite's collectives are asked for. torch's own dispatcher, which sees every c10d operation whoever issues it,
must have seen exactly those: nothing is hidden in logging, metrics or the optimizer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.distributed import jobs_training
from tests.distributed.configs import SINGLE, config_of, write_tokens
from tests.distributed.layouts import Case

LAYERS = 4
BASE: Case = {**SINGLE, "tied": False, "kv_heads": 4, "vocab_size": 96, "layers": LAYERS, "masked": False, "dropout": 0.0}

# Per microbatch on the stage that holds them, beyond the layers:
EMBEDDING = Counter({("all_reduce", "tp"): 1})
EMBEDDING_SP = Counter({("reduce_scatter", "tp"): 1, ("all_gather", "tp"): 1})  # its output; in backward the gradient
HEAD = Counter({("all_reduce", "tp"): 1, ("all_gather", "tp"): 1})  # its input gradient; the loss's statistics
HEAD_SP = Counter({("all_gather", "tp"): 3, ("reduce_scatter", "tp"): 1})  # its input twice and the statistics; its input gradient
# Per layer and microbatch:
LAYER = Counter({("all_reduce", "tp"): 4})  # forward: attention output, mlp output; backward: the inputs of both
LAYER_SP = Counter({("all_gather", "tp"): 4 + 2, ("reduce_scatter", "tp"): 4})  # the same as pairs, and in backward both inputs again
# Per step:
NORM = Counter({("all_reduce", "world"): 1})  # gradient norm, loss, waiting time and stop requests together
TOKENS = Counter({("all_reduce", "data"): 1})  # the count of valid tokens, where some can be ignored
PARTIAL = Counter({("all_reduce", "tp"): 1})  # gradients of norms under sequence parallelism, together
KV_REPLICAS = Counter({("all_reduce", "kv_replica"): 1})  # gradients of shared key-value heads, together
TIED = Counter({("all_reduce", "tied_pair"): 1})


def times(counter: Counter, count: int) -> Counter:
    return Counter({key: value * count for key, value in counter.items()})


def bucket_traffic(zero: int, buckets: int) -> Counter:
    """One a bucket: reduced where complete, gathered where sharded."""
    if zero == 0:
        return Counter({("all_reduce", "data"): buckets})
    return Counter({("reduce_scatter", "data"): buckets, ("all_gather", "data"): buckets})


def boundary(pp: int, stage: int, microbatches: int) -> Counter:
    """Activations to the next stage and gradients from it, and the same with the one before."""
    neighbours = (stage > 0) + (stage < pp - 1)
    return Counter({("isend", "pp"): neighbours * microbatches, ("irecv", "pp"): neighbours * microbatches})


CASES: dict[str, Case] = {
    "tp2": {"tp": 2, "microbatches": 2},
    "tp2-sp": {"tp": 2, "sequence_parallel": True, "microbatches": 2},
    "tp4-sp-kv1": {"tp": 4, "sequence_parallel": True, "kv_heads": 1},
    "dp2-zero0": {"dp": 2, "microbatches": 2},
    "dp2-zero1-masked": {"dp": 2, "zero": 1, "masked": True, "microbatches": 2},
    "pp2-tied": {"pp": 2, "tied": True, "microbatches": 4},
    "tp2-pp2-dp2-sp-zero1-tied": {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "tied": True, "microbatches": 4},
}


def expected_traffic(case: Case, found: dict[str, Any]) -> Counter:
    """`found` says where the rank is, and whether the shards that it owns hold any of the gradients that are summed over tp."""
    tp, pp, dp, microbatches, stage = case["tp"], case["pp"], case["dp"], case["microbatches"], found["pp"]
    sp, first, last = case["sequence_parallel"], stage == 0, stage == pp - 1
    total = Counter(NORM)
    if tp > 1:
        total += times(LAYER_SP if sp else LAYER, LAYERS // pp * microbatches)
        total += times(EMBEDDING_SP if sp else EMBEDDING, first * microbatches) + times(HEAD_SP if sp else HEAD, last * microbatches)
        total += PARTIAL if sp and found["partial"] else Counter()
        total += KV_REPLICAS if tp > case["kv_heads"] and found["replicated"] else Counter()
    if dp > 1:
        total += bucket_traffic(case["zero"], found["buckets"]) + (TOKENS if case["masked"] else Counter())
    if pp > 1:
        total += boundary(pp, stage, microbatches)
        total += TIED if case["tied"] and (first or last) else Counter()
    return total


@pytest.mark.parametrize("name", CASES)
def test_a_step_communicates_exactly_this(name, ranks, tmp_path):
    case = {**BASE, **CASES[name]}
    partition = {"partition": [LAYERS // case["pp"]] * case["pp"]}
    config = config_of(case, write_tokens(tmp_path, case["vocab_size"]), parallel=partition)
    results = ranks.run(case["tp"] * case["pp"] * case["dp"], jobs_training.communication_of_a_step, config)
    assert not case["sequence_parallel"] or any(found["partial"] for found in results)
    for rank, found in enumerate(results):
        assert found["buckets"] > 1
        assert found["traffic"] == expected_traffic(case, found), f"rank {rank}"
        assert found["observed"] == found["expected"], f"rank {rank}"


def test_full_recomputation_repeats_the_forward_of_the_layers_and_nothing_else(ranks, tmp_path):
    case = {**BASE, "tp": 2, "microbatches": 2, "recompute": "full"}
    config = config_of(case, write_tokens(tmp_path, case["vocab_size"]))
    found = ranks.run(2, jobs_training.communication_of_a_step, config)[0]
    forward_of_the_layers = times(Counter({("all_reduce", "tp"): 2}), LAYERS * case["microbatches"])
    assert found["traffic"] == expected_traffic(case, found) + forward_of_the_layers
    assert found["observed"] == found["expected"]
