"""Blocks with a state (delta rule, Kimi's decay by channel, short convolution) train in every layout as on one process.

fp64, within 1e-9: losses, gradient norms and weights. Layers of these blocks stand between layers of attention, and
rows hold several documents. `tests/kernels/test_recurrence.py` has the recurrences against their definition,
`tests/huggingface` the whole models against transformers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from megalite.config.load import from_dict
from megalite.planner.memory.estimate import estimate
from tests.distributed.test_equivalence import assert_same_run
from tests.support import jobs, jobs_memory
from tests.support.configs import SEQUENCE, case_of, config_of, config_of_one_process, micro_batch, write_tokens
from tests.support.pool import RankContext

STEPS = 3
BASE = case_of(tied=False, kv_heads=2, vocab_size=96, layers=4, masked=True, dropout=0.1, precision="fp64") | {
    "microbatches": 4
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "delta_norm_eps": 1e-6,
}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 6, "mamba_state_size": 5, "mamba_n_groups": 2}
MECHANISMS: dict[str, dict[str, Any]] = {
    "delta": {**DELTA, "delta_negative_eigenvalues": True},
    "delta, one key head": {**DELTA, "linear_num_key_heads": 1},
    "kimi": {**DELTA, "linear_num_key_heads": 4, "delta_decay": "channel"},
    "mamba": {**MAMBA, "mamba_time_step_limit": [0.004, 0.05]},
    "mamba, one group": {**MAMBA, "mamba_n_groups": 1, "mamba_norm": "norm_first", "mamba_proj_bias": True},
    "mamba, factors": {
        **MAMBA,
        "mamba_norm": "none",
        "mamba_multipliers": [0.5, 1.5, 0.7, 1.2, 0.8],
        "mamba_in_multiplier": 1.3,
        "mamba_out_multiplier": 0.6,
    },
    "convolution": {},
    "convolution, with biases": {"conv_bias": True, "conv_kernel": 4},
}
KINDS = {"delta": "delta", "kimi": "delta", "mamba": "mamba", "convolution": "convolution"}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("delta", {"tp": 2, "pp": 2, "schedule": "1f1b"}),
    ("delta", {"tp": 4, "sequence_parallel": True, "recompute": "full"}),
    ("delta", {"dp": 2, "zero": 3, "recompute": "mixer+mixer_in+attn_norm"}),
    ("delta", {"pp": 2, "schedule": "zb-v", "dp": 2, "zero": 1}),
    ("delta", {"dp": 2, "optimizer": "muon", "recompute": "residual+mixer"}),
    ("delta, one key head", {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 2}),
    ("kimi", {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-h1"}),
    ("kimi", {"tp": 2, "recompute": "mixer_in+mixer"}),
    ("kimi", {"dp": 2, "zero": 3, "recompute": "budget"}),
    ("delta", {"cp": 4, "context": "ring"}),
    ("delta, one key head", {"cp": 2, "context": "ulysses", "tp": 2, "sequence_parallel": True}),
    ("delta", {"cp": 3, "context": "gather", "recompute": "mixer+mixer_in"}),
    ("delta", {"cp": 4, "context": "ring", "context_inner": 2, "recompute": "full"}),
    ("kimi", {"cp": 2, "context": "ring", "tp": 2, "pp": 2, "schedule": "zb-v"}),
    ("kimi", {"cp": 2, "context": "ulysses", "dp": 2, "zero": 3}),
    ("convolution", {"cp": 4, "context": "gather"}),
    ("convolution, with biases", {"cp": 2, "context": "ulysses", "recompute": "mixer"}),
    ("mamba", {"tp": 2, "pp": 2, "schedule": "1f1b"}),
    ("mamba", {"tp": 4, "sequence_parallel": True, "recompute": "full"}),
    ("mamba", {"dp": 2, "zero": 3, "recompute": "mixer+mixer_in+attn_norm"}),
    ("mamba, one group", {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-h1"}),
    ("mamba, one group", {"tp": 4, "recompute": "mixer"}),
    ("mamba, factors", {"tp": 2, "dp": 2, "zero": 1}),
    ("mamba", {"cp": 4, "context": "ring"}),
    ("mamba, one group", {"cp": 2, "context": "ulysses", "tp": 2, "sequence_parallel": True}),
    ("delta", {"cp": 2, "context": "auto", "tp": 2, "sequence_parallel": True}),
    ("mamba", {"cp": 2, "context": "auto", "recompute": "full"}),
    ("delta", {"cp": 2, "context": "gather", "context_parts": "balanced"}),
    ("convolution", {"pp": 2, "schedule": "v-half", "dp": 2, "zero": 1}),
    ("convolution, with biases", {"tp": 2, "sequence_parallel": True, "recompute": "mixer+residual"}),
]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def configs(prefix: str, mechanism: str, mixed: bool = True, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout's configuration, and that of the same model, data and global batch on one process."""
    kind = KINDS[mechanism.split(",")[0]]
    blocks = [f"{kind}+feed_forward"] * 4
    if mixed:
        blocks[1] = "attention+feed_forward"
    model = {"layer_blocks": blocks, "initializer_range": 0.2, **MECHANISMS[mechanism]}
    case = {**BASE, **layout}
    several, one = config_of(case, prefix, "fp64", model=model), config_of_one_process(case, prefix)
    one["model"] |= model
    return several, one


def world(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))


@pytest.mark.parametrize("mechanism, layout", LAYOUTS, ids=str)
def test_trains_like_one_process(mechanism, layout, ranks, references, prefix):
    several, one = configs(prefix, mechanism, **layout)
    got = ranks.run(world(layout), jobs.train, several, STEPS)
    assert_same_run(got, references.run(jobs.train, one, STEPS), 1e-9, 1e-9)


@pytest.mark.parametrize("mechanism", ["delta", "kimi", "mamba", "convolution"])
def test_adapters_train_like_those_of_one_process(mechanism, ranks, references, prefix):
    several, one = configs(prefix, mechanism, tp=2, sequence_parallel=True)
    for config in (several, one):
        config["lora"] = {"rank": 2, "alpha": 8.0, "dropout": 0.1}
    got = ranks.run(2, jobs.train, several, 2)
    assert_same_run(got, references.run(jobs.train, one, 2), 1e-9, 1e-9)
    adapted = [name for name in got[0]["tensors"] if ".mixer." in name and name.endswith("lora_b")]
    assert adapted and all(got[0]["tensors"][name].abs().max() > 0 for name in adapted)


MEMORY = {"dropout": 0.0, "masked": False, "vocab_size": 104}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mechanism", ["delta", "kimi", "mamba", "convolution"])
def test_activations_are_what_autograd_keeps(mechanism, recompute, prefix):
    """To the byte."""
    config, _ = configs(prefix, mechanism, False, recompute=recompute, **MEMORY)
    (planned,) = estimate(from_dict(config), 1, "cpu")
    assert (planned.activations, planned.logits) == jobs_memory.most_kept(RankContext(0, 1), config)


def test_its_operation_frees_what_it_computes(prefix):
    """Of four layers at the peak, which is at the head, in fp64."""
    kept, dropped = (
        estimate(from_dict(configs(prefix, "delta", False, recompute=recompute, **MEMORY)[0]), 1, "cpu")[0].activations
        for recompute in ("none", "mixer")
    )
    tokens, heads = micro_batch(BASE) * SEQUENCE, 4
    assert kept - dropped == 4 * 8 * tokens * (2 * heads * 5 + heads)  # output, its squares, the gated norm
