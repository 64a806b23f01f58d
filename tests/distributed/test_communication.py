"""What one step communicates is what the design says, to the last message, and nothing communicates besides.

The mesh counts what megalite's collectives are asked for. torch's own dispatcher, which sees every c10d operation
whoever issues it, must have seen exactly those: nothing is hidden in logging, metrics or the optimizer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support import jobs_training
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces import layouts
from tests.support.spaces.layouts import Case

BASE: Case = {**SINGLE, "tied": False, "kv_heads": 4, "vocab_size": 96, "layers": 4, "masked": False, "dropout": 0.0}

# Per microbatch on the stage that holds them, beyond the layers:
EMBEDDING = Counter({("all_reduce", "tp"): 1})
EMBEDDING_SP = Counter({("reduce_scatter", "tp"): 1, ("all_gather", "tp"): 1})  # its output; in backward the gradient
HEAD = Counter({("all_reduce", "tp"): 1, ("all_gather", "tp"): 1})  # its input gradient; the loss's statistics
# its input twice and the statistics; its input gradient
HEAD_SP = Counter({("all_gather", "tp"): 3, ("reduce_scatter", "tp"): 1})
# Per layer and microbatch:
LAYER = Counter({("all_reduce", "tp"): 4})  # forward: attention output, mlp output; backward: the inputs of both
# the same as pairs, and in backward both inputs again
LAYER_SP = Counter({("all_gather", "tp"): 4 + 2, ("reduce_scatter", "tp"): 4})
# The same, over a cp axis of `ranks`: of forward and backward together
CONTEXT = {
    "ulysses": lambda ranks: Counter(
        {("all_to_all", "cp"): 2 + 2}
    ),  # q, k and v there, the output back; in backward dout, and dq, dk and dv
    "gather": lambda ranks: Counter({("all_gather", "cp"): 1 + 1, ("reduce_scatter", "cp"): 1}),
    "ring": lambda ranks: Counter({("hop", "cp"): (ranks - 1) + 2 * (ranks - 1)}),
}
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


FOLDED = ("zb-v", "v-half")
CHAINED = ("zb-h2", "zb-v")


def boundaries(case: Case, rank: int) -> int:
    """Stage boundaries between a rank and others: its stages follow each other rank by rank, round and round or there
    and back."""
    chunks = layouts.stages(case) // case["pp"]
    if case["schedule"] in FOLDED:
        return chunks * ((rank > 0) + (rank < case["pp"] - 1))
    return 2 * chunks - (rank == 0) - (rank == case["pp"] - 1)


def messages(case: Case, rank: int) -> Counter:
    """For each boundary and microbatch an activation one way and a gradient the other way."""
    count = boundaries(case, rank) * case["microbatches"]
    return Counter({("isend", "pp"): count, ("irecv", "pp"): count})


def chain(case: Case, rank: int) -> Counter:
    """The norm and the other sums, added stage by stage, and the total on its way back."""
    neighbours = (rank > 0) + (rank < case["pp"] - 1)
    return Counter(
        {
            ("isend", "totals"): neighbours,
            ("irecv", "totals"): neighbours,
            ("all_reduce", "stage"): case["tp"] * case["dp"] > 1,
        }
    )


ALL = {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "tied": True, "microbatches": 4}
CASES: dict[str, Case] = {
    "tp2": {"tp": 2, "microbatches": 2},
    "tp2-sp": {"tp": 2, "sequence_parallel": True, "microbatches": 2},
    "tp4-sp-kv1": {"tp": 4, "sequence_parallel": True, "kv_heads": 1},
    "dp2-zero0": {"dp": 2, "microbatches": 2},
    "dp2-zero1-masked": {"dp": 2, "zero": 1, "masked": True, "microbatches": 2},
    "pp2-tied": {"pp": 2, "tied": True, "microbatches": 4},
    **{f"tp2-pp2-dp2-sp-zero1-tied-{schedule}": {**ALL, "schedule": schedule} for schedule in ("1f1b", "zb-v")},
    **{
        f"pp4-{schedule}": {"pp": 4, "microbatches": 4, "schedule": schedule}
        for schedule in layouts.OPTIONS["schedule"]
    },
    "cp2-ulysses-tp2-sp": {"cp": 2, "context": "ulysses", "tp": 2, "sequence_parallel": True, "microbatches": 2},
    "cp2-gather-dp2-zero1": {"cp": 2, "context": "gather", "dp": 2, "zero": 1},
    "cp4-ring-masked": {"cp": 4, "context": "ring", "masked": True},
    "pp3-interleaved-2": {"pp": 3, "microbatches": 8, "schedule": "interleaved-2"},  # in groups of four
}


def expected_traffic(case: Case, result: dict[str, Any]) -> Counter:
    """`found` says where the rank is, and whether the shards that it owns hold any of the gradients that are summed
    over tp."""
    tp, pp, dp, cp, microbatches, rank = (
        case["tp"],
        case["pp"],
        case["dp"],
        case["cp"],
        case["microbatches"],
        result["pp"],
    )
    chained = pp > 1 and case["schedule"] in CHAINED
    sp, first, last = case["sequence_parallel"], rank == 0, rank == (0 if case["schedule"] in FOLDED else pp - 1)
    total = chain(case, rank) if chained else Counter(NORM)
    if tp > 1:
        total += times(LAYER_SP if sp else LAYER, case["layers"] // pp * microbatches)
        total += times(EMBEDDING_SP if sp else EMBEDDING, first * microbatches) + times(
            HEAD_SP if sp else HEAD, last * microbatches
        )
        total += PARTIAL if sp and result["partial"] else Counter()
        total += KV_REPLICAS if tp > case["kv_heads"] and result["replicated"] else Counter()
    if cp > 1:
        total += times(CONTEXT[case["context"]](cp), case["layers"] // pp * microbatches)
    if dp * cp > 1:
        total += bucket_traffic(case["zero"], result["buckets"]) + (TOKENS if case["masked"] else Counter())
    if pp > 1:
        total += messages(case, rank)
        total += TIED if case["tied"] and first != last else Counter()
    return +total


@pytest.mark.parametrize("name", CASES)
def test_a_step_communicates_exactly_this(name, ranks, tmp_path):
    case = {**BASE, **CASES[name]}
    case["layers"] = max(case["layers"], layouts.stages(case))
    config = config_of(case, write_tokens(tmp_path, case["vocab_size"]))
    config["parallel"]["partition"] = [case["layers"] // layouts.stages(case)] * layouts.stages(case)
    results = ranks.run(layouts.world(case), jobs_training.communication_of_a_step, config)
    assert not case["sequence_parallel"] or any(result["partial"] for result in results)
    assert case["dp"] == 1 or any(result["buckets"] > 1 for result in results)
    for rank, result in enumerate(results):
        assert result["traffic"] == expected_traffic(case, result), f"rank {rank}"
        assert result["observed"] == result["expected"], f"rank {rank}"


def test_full_recomputation_repeats_the_forward_of_the_layers_and_nothing_else(ranks, tmp_path):
    case = {**BASE, "tp": 2, "microbatches": 2, "recompute": "full"}
    config = config_of(case, write_tokens(tmp_path, case["vocab_size"]))
    result = ranks.run(2, jobs_training.communication_of_a_step, config)[0]
    forward_of_the_layers = times(Counter({("all_reduce", "tp"): 2}), case["layers"] * case["microbatches"])
    assert result["traffic"] == expected_traffic(case, result) + forward_of_the_layers
    assert result["observed"] == result["expected"]
