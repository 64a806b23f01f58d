"""Blocks with a state (delta rule, Kimi's decay by channel, short convolution) train in every layout as on one process.

fp64, within 1e-9: losses, gradient norms and weights. Layers of these blocks stand between layers of attention, and
rows hold several documents. `tests/kernels/test_recurrence.py` has the recurrences against their definition,
`tests/huggingface` the whole models against transformers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalite.checkpoint.directories import step_name
from megalite.config.load import from_dict
from megalite.model.blocks.delta import gates
from megalite.planner.memory.estimate import estimate
from tests.distributed.test_equivalence import assert_same_run
from tests.support import jobs, jobs_memory
from tests.support.configs import (
    SEQUENCE,
    case_of,
    config_of,
    config_of_one_process,
    micro_batch,
    with_fewer_rows,
    write_tokens,
)
from tests.support.jobs_hybrids import fit_until_killed_in, losses_of_documents
from tests.support.jobs_training import resume
from tests.support.pool import RankContext, RankError

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
    "all of them": {
        **(DELTA | MAMBA),
        "layer_blocks": ["delta+feed_forward", "mamba|attention+feed_forward", "convolution", "mamba"],
    },
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
    ("delta", {"cp": 2, "context": "ring", "masked": False, "pp": 2, "schedule": "zb-h1"}),
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
    ("all of them", {"pp": 2, "tp": 2, "sequence_parallel": True, "cp": 2, "context": "ring"}),
    ("all of them", {"dp": 2, "zero": 3, "recompute": "mixer+mixer_in+qkv+residual"}),
    ("convolution", {"pp": 2, "schedule": "v-half", "dp": 2, "zero": 1}),
    ("convolution, with biases", {"tp": 2, "sequence_parallel": True, "recompute": "mixer+residual"}),
]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def configs(prefix: str, mechanism: str, mixed: bool = True, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout's configuration, and that of the same model, data and global batch on one process."""
    kind = KINDS.get(mechanism.split(",")[0])
    blocks = [f"{kind}+feed_forward"] * 4
    if mixed:
        blocks[1] = "attention+feed_forward"
    model = {"layer_blocks": blocks, "initializer_range": 0.2, **MECHANISMS[mechanism]}
    case = {**BASE, **layout}
    several, one = config_of(case, prefix, "fp64", model=model), config_of_one_process(case, prefix)
    one["model"] |= model
    return several, one


def small_configs(prefix: str, mechanism: str, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same with fewer rows, and fewer microbatches where there is no pipeline."""
    several, one = configs(prefix, mechanism, **{"microbatches": 4 if "pp" in layout else 2, **layout})
    with_fewer_rows(several, one)
    return several, one


def world(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))


@pytest.mark.parametrize("mechanism, layout", LAYOUTS, ids=str)
def test_trains_like_one_process(mechanism, layout, ranks, references, prefix):
    several, one = small_configs(prefix, mechanism, **layout)
    got = ranks.run(world(layout), jobs.train, several, 2)
    assert_same_run(got, references.run(jobs.train, one, 2), 1e-9, 1e-9)


@pytest.mark.parametrize("mechanism", ["delta", "kimi", "mamba", "convolution"])
def test_adapters_train_like_those_of_one_process(mechanism, ranks, references, prefix):
    several, one = small_configs(prefix, mechanism, tp=2, sequence_parallel=True)
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
    assert kept - dropped == 4 * 8 * tokens * (2 * heads * 5)  # output, the gated norm


@pytest.mark.parametrize("mechanism", ["delta", "kimi", "mamba", "convolution"])
def test_a_document_has_the_loss_that_it_has_alone(mechanism, ranks, prefix):
    """In a row with others, in one process and over four cp ranks: a short document, one over more than three
    segments of positions, and one that ends the row within its segment."""
    options = {"masked": True, "dropout": 0.0}
    documents = [[5, 9, 3], [7 + token % 80 for token in range(29)], [11, 2, 4, 8], [6] * 12]
    length = sum(map(len, documents))
    several, _ = configs(prefix, mechanism, cp=4, context="gather", **options)
    alone, _ = configs(prefix, mechanism, **options)
    for config in (several, alone):
        config["data"]["sequence_length"] = length
        config["model"]["max_position_embeddings"] = length
    expected = [losses_of_documents(RankContext(0, 1), alone, [document])[0] for document in documents]
    assert losses_of_documents(RankContext(0, 1), alone, documents) == pytest.approx(expected, rel=1e-10, abs=0)
    for got in ranks.run(4, losses_of_documents, several, documents):
        assert got == pytest.approx(expected, rel=1e-10, abs=0)


def test_small_queries_and_keys_have_the_length_of_the_formula():
    """Epsilon is added to the sum of squares: it is neither a lower bound of the sum nor added to a mean."""
    x = torch.full((2, 1, 1, 4), 5e-4, dtype=torch.float64, requires_grad=True)  # the sum of squares is epsilon
    expected = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    dy = torch.randn_like(x)
    (gradient,) = torch.autograd.grad((expected * dy).sum(), x)
    torch.testing.assert_close(gates.unit_length(x), expected, rtol=1e-14, atol=0)
    assert gates.unit_length(x).square().sum().item() == pytest.approx(len(x) / 2, rel=1e-12)
    torch.testing.assert_close(gates.unit_length_backward(dy, x), gradient, rtol=1e-12, atol=0)


def test_a_killed_run_goes_on_on_any_layout(ranks, references, prefix, tmp_path):
    several, one = small_configs(prefix, "all of them", tp=2, sequence_parallel=True)
    straight = ranks.run(2, jobs.train, several, STEPS)[0]
    several["run"] |= {"dir": str(tmp_path), "name": "killed"}
    several["checkpoint"] |= {"load": "auto", "interval": 1}
    with pytest.raises(RankError, match="exit code -9"):
        ranks.run(2, fit_until_killed_in, several, STEPS)
    got = ranks.run(2, resume, several, 1, ("weight",))[0]
    assert got["place"]["step"] == STEPS - 1 and got["losses"] == straight["losses"][-1:]
    assert all(torch.equal(tensor, straight["tensors"][name]) for name, tensor in got["tensors"].items())
    whole = references.run(jobs.train, one, STEPS)
    for layout in ({"pp": 2, "dp": 2, "zero": 3}, {"cp": 2, "context": "ring"}):
        other, _ = small_configs(prefix, "all of them", **layout)
        other["checkpoint"]["load"] = str(tmp_path / "killed" / "checkpoints" / step_name(STEPS - 1))
        got = ranks.run(world(layout), resume, other, 1, ("weight",))[0]
        assert got["losses"] == pytest.approx(whole["losses"][-1:], rel=1e-9, abs=0)
        for name, tensor in got["tensors"].items():
            assert (tensor - whole["tensors"][name]).abs().max() <= 1e-9, name
