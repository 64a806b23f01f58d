"""The planner's memory and traffic against runs: what the store allocates, what autograd keeps, what the allocator
gives, what is sent."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.assembly import parts as build
from megalite.assembly import plan
from megalite.assembly.fp8_matrices import describe_fp8
from megalite.config.dims import ParallelDims
from megalite.config.load import from_dict
from megalite.families.presets import preset
from megalite.mesh.mesh import Mesh
from megalite.model.parameters import model_specs
from megalite.parallel.sharding.buckets import BucketLayout
from megalite.parallel.spec import parameter_count
from megalite.planner.memory.activations import Activations
from megalite.planner.memory.estimate import Standing, estimate, resolve_layout
from megalite.planner.time.traffic import ring, traffic
from megalite.training import meta_device as meta
from tests.support import decaying_convolution, jobs_memory, short_convolution
from tests.support.pool import RankContext

MODEL = {
    **{"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128},
}
Options = dict[str, Any] | None
LORA, SOME, FEW = {"rank": 4}, {"rank": 4, "targets": ["q", "down"]}, {"rank": 4, "targets": ["q"]}
DORA = {"rank": 4, "ranks": {"o": 2}, "dora": True, "modules_to_save": ["embedding", "norms"]}
BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4}  # whole blocks of fp8 at tp 2
FP8_GRADIENTS = {"fp8": "block", "fp8_weight_gradients": True, "micro_batch_size": 16, "global_batch_size": 16}
GPT2 = {
    "norm": "layer",
    "gated_mlp": False,
    "position": "learned",
    "attention_bias": True,
    "mlp_bias": True,
    "attention_out_bias": True,
}
LATENTS = {
    "num_key_value_heads": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
QUERIES = LATENTS | {"q_lora_rank": 10}
INDEXED = QUERIES | {"index_topk": 20, "index_n_heads": 4, "index_head_dim": 6, "index_loss_coef": 0.5}
SHARING = INDEXED | {"indexer_types": ["full", "shared", "full", "shared"]}
DECAYS = {"layer_blocks": [f"{decaying_convolution.KIND}+feed_forward"] * 4}
DELTA = {
    "layer_blocks": ["delta+feed_forward"] * 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
MIXED = DELTA | {"layer_blocks": ["delta+feed_forward", "attention+feed_forward"] * 2}
MIXED |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}  # with which auto exchanges heads
KIMI = DELTA | {"linear_num_key_heads": 4, "delta_decay": "channel"}
MAMBA = {
    "layer_blocks": ["mamba|attention+feed_forward"] * 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "mamba_state_size": 5,
    "mamba_n_groups": 2,
    "mamba_multipliers": [0.5, 1.5, 0.7, 1.2, 0.8],
    "mamba_out_multiplier": 0.5,
    "attention_out_multiplier": 0.6,
    "mlp_multipliers": [0.7, 1.3],
}
CONVOLUTION = {"layer_blocks": ["convolution+feed_forward", "attention+feed_forward"] * 2}
FACTORS = {"query_scale_beta": 0.7, "query_scale_positions": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# in blocks of 128 × 128, except for the keys and values
BLOCKS = {"hidden_size": 128, "intermediate_size": 256}
CODED_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
NORMED = {"norm_weight": False, "embedding_norm": True, "qk_norm": "head", "qk_norm_after_rope": True}
# numbers of heads by layer; narrow values, with more key-value heads and sinks in layers with a window
SHAPES = {"layer_heads": [4, 8, 8, 4], "head_dim": 10, "sliding_window": 16, "sliding_window_layers": [1, 3]}
NARROW = {"num_key_value_heads": 1, "value_head_dim": 6, "local_attention": {"num_key_value_heads": 2, "head_dim": 10}}
NARROW |= {"sliding_window": 16, "sliding_window_layers": [1, 3], "attention_sinks": True, "sink_layers": [1, 3]}
REWARD: dict[str, Any] = {"model": {"output_head": "reward"}, "train": {"objective": "reward"}}
NORM_AND_GATES = {"norm_placement": "both", "attention_gate": True, "num_hidden_layers": 2}
UNLIKE = ["feed_forward", "attention|feed_forward", "attention", "feed_forward|attention"]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with short_convolution.registered(decaying_convolution.DecayingConvolutionKind()):
        yield


def tree(
    *,
    model: Options = None,
    train: Options = None,
    lora: Options = None,
    optimizer: str = "adamw",
    moments: str = "fp32",
    **parallel: Any,
) -> dict[str, dict[str, Any]]:
    return {
        "optimizer": {"name": optimizer, "moments": moments},
        "model": {**MODEL, **(model or {})},
        "lora": lora or {},
        "parallel": {"dp": 1, "bucket_mb": 0.02, **parallel},
        "data": {"sequence_length": 80},
        "train": {
            "global_batch_size": 4 * parallel.get("pp", 1) * parallel.get("dp", 1),
            "micro_batch_size": 2,
            **(train or {}),
        },
    }


ALONE = {
    "every tensor": {},
    "selective": {"train": {"recompute": "selective"}},
    "full": {"train": {"recompute": "full"}},
    "every second layer": {"train": {"recompute": "every-2"}},
    "bf16": {"train": {"precision": "bf16"}},
    "like GPT-2": {"model": GPT2},
    "norms everywhere, soft caps": {
        "model": {"norm_placement": "both", "qk_norm": "head", "attention_softcap": 5.0, "logit_softcap": 9.0}
    },
    "norms after, of queries and keys": {"model": {"norm_placement": "post", "qk_norm": "full", "sliding_window": 16}},
    "parallel, one norm, multipliers": {
        "model": {
            "parallel_block": "shared_norm",
            "norm": "layer",
            "norm_bias": False,
            "residual_multiplier": 0.5,
            "logit_scale": 0.25,
        }
        | {"qk_norm": "each_head"}
    },
    "parallel, two norms, plain": {
        "model": GPT2 | {"parallel_block": "two_norms", "position": "rope", "partial_rotary_factor": 0.25}
    },
    "factors on queries": {"model": FACTORS},
    "two rotary tables": {"model": {"rope_local_theta": 100.0, "sliding_window": 16, "sliding_window_layers": [0, 1]}},
    "norms without weights, of the embedding, after the rotation": {"model": NORMED},
    "xIELU, norms of the embedding": {
        "model": {"hidden_act": "xielu", "gated_mlp": False, "embedding_norm": True, "norm": "layer"},
        "train": {"recompute": "selective"},
    },
    "gates": {"model": {"attention_gate": True}},
    "gates, norms of heads, factors on queries": {
        "model": {"attention_gate": True, "qk_norm": "head", "attention_bias": True} | FACTORS
    },
    "gates of heads, numbers of heads by layer": {
        "model": SHAPES | {"attention_gate": True, "attention_gate_act": "softplus", "attention_gate_width": "head"}
    },
    "narrow values, sinks in layers with a window": {"model": NARROW},
    "blocks beside each other, layers of one block": {"model": {"layer_blocks": UNLIKE}},
    "the same, adapters": {"model": {"layer_blocks": UNLIKE}, "lora": SOME},
    "the same, weight passes": {"model": {"layer_blocks": UNLIKE}, "schedule": "zb-h1"},
    "mamba beside attention, factors": {"model": MAMBA},
    "mamba without norms": {"model": MAMBA | {"mamba_norm": "none"}},
    "a reward model": REWARD,
    "adapters": {"lora": LORA},
    "adapters over a quantized base": {"lora": LORA | {"base": "nf4", "double_quant": True}},
    "adapters of some projections": {"lora": SOME},
    "DoRA": {"lora": DORA | {"targets": ["q", "o", "down"]}, "model": GPT2},
    "latents, factors on queries": {"model": LATENTS | FACTORS},
    "an indexer": {"model": SHARING},
    "an indexer, not trained": {"model": SHARING | {"index_loss_coef": 0.0}, "train": {"precision": "bf16"}},
    "an indexer, recomputed": {"model": SHARING, "train": {"recompute": "full"}},
    "an indexer, weight passes": {"model": SHARING, "schedule": "zb-h1"},
    "an indexer of all rows": {"model": INDEXED | {"index_topk": 80}},
    "two modules ahead": {"model": {"mtp_layers": 2}},
    "a module ahead, tied, recomputed": {
        "model": {"mtp_layers": 1, "tie_word_embeddings": True},
        "train": {"recompute": "full"},
    },
    "adapters on latents": {"model": QUERIES, "lora": {"rank": 4, "targets": ["q_b", "kv_a", "o"]}},
    "adapters on a query's latent": {"model": QUERIES, "lora": {"rank": 4, "targets": ["q_a", "o"]}},
}
ALONE |= {
    f"{name}, {mode} recomputed": {"model": model, "train": {"recompute": mode}}
    for name, model, modes in (
        ("attention", {}, ("attention", "mlp_norm+mlp_in", "qkv", "residual", "qkv+residual")),
        ("gates of the output, a norm of it", NORM_AND_GATES, ("residual+mlp_out",)),
        ("latents", QUERIES, ("qkv", "attn_norm+qkv+scores+attention+mlp_norm+mlp_in")),
        ("an indexer", SHARING, ("qkv", "attention", "attn_norm+qkv+attention+mlp_norm+mlp_in")),
    )
    for mode in modes
}
ON_TWO = {
    **{f"tp, {mode}": {"tp": 2, "train": {"recompute": mode}} for mode in ("none", "selective", "full")},
    **{
        f"tp and sp, {mode}": {"tp": 2, "sequence_parallel": True, "train": {"recompute": mode}}
        for mode in ("none", "selective", "full")
    },
    **{f"pp, {name}": {"pp": 2, "schedule": name} for name in ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half")},
    **{
        f"tp and sp, zb-h1, {name}": {"tp": 2, "sequence_parallel": True, "schedule": "zb-h1", "model": model}
        for name, model in (
            ("heads", {}),
            ("an indexer", SHARING),
            ("a recurrence", DELTA),
            ("gates, one norm", {"attention_gate": True, "parallel_block": "shared_norm"}),
        )
    },
    "tp and sp, a reward model": {"tp": 2, "sequence_parallel": True, **REWARD},
    "pp, zb-h1, a reward model, adapters": {"pp": 2, "schedule": "zb-h1", "lora": LORA, **REWARD},
    "tp, zb-h1, adapters, gates": {
        **{"tp": 2, "schedule": "zb-h1", "lora": LORA, "model": {"attention_gate": True}},
    },
    "pp, outputs of blocks recomputed": {"pp": 2, "train": {"recompute": "attn_norm+mlp_norm+mlp_out"}},
    "tp and sp, adapters": {"tp": 2, "sequence_parallel": True, "lora": LORA},
    "tp and sp, norms without weights": {"tp": 2, "sequence_parallel": True, "model": NORMED},
    "pp, zb-h1, adapters": {"pp": 2, "schedule": "zb-h1", "lora": SOME},
    "pp, zb-h1, DoRA": {"pp": 2, "schedule": "zb-h1", "lora": DORA},
    "tp and sp, latents": {"tp": 2, "sequence_parallel": True, "model": QUERIES},
    "tp, an indexer": {"tp": 2, "model": SHARING},
    "tp and sp, an indexer": {"tp": 2, "sequence_parallel": True, "model": SHARING},
    "tp and sp, an indexer, attention recomputed": {
        **{"tp": 2, "sequence_parallel": True, "model": SHARING},
        "train": {"recompute": "attention"},
    },
    "cp, gather, an indexer": {"cp": 2, "context": "gather", "model": SHARING},
    "cp, ulysses, an indexer": {"cp": 2, "model": SHARING},
    "tp and sp, a module ahead": {"tp": 2, "sequence_parallel": True, "model": {"mtp_layers": 1}},
    "pp, zb-h1, a module ahead": {"pp": 2, "schedule": "zb-h1", "model": {"mtp_layers": 1}},
    "pp, zb-h1, unlike layers": {"pp": 2, "schedule": "zb-h1", "model": {"layer_blocks": UNLIKE}},
    "pp, zb-h1, mamba beside attention": {"pp": 2, "schedule": "zb-h1", "model": MAMBA},
    "pp, zb-h1, a decay by channel, adapters of its latents": {
        **{"pp": 2, "schedule": "zb-h1", "model": KIMI},
        "lora": {"rank": 4, "targets": ["delta_f_a", "delta_o", "down"]},
    },
    "pp, zb-h1, latents": {"pp": 2, "schedule": "zb-h1", "model": QUERIES},
    "pp, zb-h1, parallel, two norms": {"pp": 2, "schedule": "zb-h1", "model": {"parallel_block": "two_norms"}},
    "cp, ulysses": {"cp": 2, "model": {"num_key_value_heads": 1}},
    "cp, gather": {"cp": 2, "context": "gather"},
    "tp and sp, gates, adapters": {"tp": 2, "sequence_parallel": True, "lora": LORA, "model": {"attention_gate": True}},
    "tp and sp, narrow values, two numbers of copies": {"tp": 2, "sequence_parallel": True, "model": NARROW},
    "cp, ulysses, narrow values, gates": {"cp": 2, "model": SHAPES | {"value_head_dim": 6, "attention_gate": True}},
    "cp, ulysses, gates": {"cp": 2, "model": {"attention_gate": True, "position": "none"}},
    "cp, ring, gates, factors on queries": {
        **{"cp": 2, "context": "ring", "model": {"attention_gate": True} | FACTORS}
    },
    "cp, ring, full": {"cp": 2, "context": "ring", "train": {"recompute": "full"}},
    "cp, gather, latents": {"cp": 2, "context": "gather", "model": QUERIES},
    "cp, ring, latents, adapters": {
        "cp": 2,
        "context": "ring",
        "model": QUERIES,
        "lora": {"rank": 4, "targets": ["kv_a", "kv_b"]},
    },
    "tp and sp, a decay by channel": {"tp": 2, "sequence_parallel": True, "model": KIMI},
    "cp, states passed": {"cp": 2, "context": "gather", "model": DELTA},
    "cp, heads of a recurrence exchanged": {"cp": 2, "model": DELTA},
    "cp, heads of a recurrence exchanged, keys gathered": {"cp": 2, "context": "auto", "model": MIXED},
    "tp and sp, mamba": {"tp": 2, "sequence_parallel": True, "model": MAMBA | {"mamba_n_groups": 1}},
    "cp, states of mamba passed": {"cp": 2, "context": "gather", "model": MAMBA},
    "cp, heads of mamba exchanged": {"cp": 2, "model": MAMBA},
    "cp, convolution": {"cp": 2, "context": "ring", "model": CONVOLUTION},
}


@pytest.mark.parametrize("case", ALONE)
def test_activations_are_what_autograd_keeps(case):
    config = tree(**ALONE[case])
    (planned,) = estimate(from_dict(config), 1, "cpu")
    assert (planned.activations, planned.logits) == jobs_memory.most_kept(RankContext(0, 1), config)


@pytest.mark.parametrize("case", ON_TWO)
def test_activations_are_what_autograd_keeps_on_two_ranks(case, ranks):
    """Of the pipeline's schedules at their peak, weight gradients that are put off included."""
    config = tree(**ON_TWO[case])
    planned = [(each.activations, each.logits) for each in estimate(from_dict(config), 2, "cpu") for _ in each.ranks]
    assert planned == ranks.run(2, jobs_memory.most_kept, config)


def test_a_mixture_beside_attention_keeps_no_norm_and_no_sum_of_its_own():
    """By what it keeps less: the loads of experts, which a plan takes as equal, are the same without it."""
    kept = []
    for block in ("none", "shared_norm"):
        config = tree(model=EXPERTS | {"parallel_block": block, "mixture_out_multiplier": 0.5})
        (planned,) = estimate(from_dict(config), 1, "cpu")
        kept.append((planned.activations, jobs_memory.most_kept(RankContext(0, 1), config)[0]))
    (before, found_before), (after, found_after) = kept
    assert before - after == found_before - found_after > 0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_module_keeps_the_output_of_the_norm_that_a_loss_in_chunks_does_not_keep(recompute):
    """By what a module adds: a chunk's own temporaries, which the plan does not name one by one, are the same without
    it."""
    added = []
    for modules in (0, 1):
        config = tree(model={"mtp_layers": modules}, train={"loss_chunk": 16, "recompute": recompute})
        (planned,) = estimate(from_dict(config), 1, "cpu")
        added.append((planned.activations + planned.logits, sum(jobs_memory.most_kept(RankContext(0, 1), config))))
    (before, found_before), (after, found_after) = added
    assert after - before == found_after - found_before


def test_activations_of_ulysses_within_a_ring_are_what_autograd_keeps(ranks):
    config = tree(cp=4, context="ring", context_inner=2, model={"num_key_value_heads": 1})
    planned = [(each.activations, each.logits) for each in estimate(from_dict(config), 4, "cpu") for _ in each.ranks]
    assert planned == ranks.run(4, jobs_memory.most_kept, config)


@pytest.mark.parametrize("changes", [{"pp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_the_peak_is_what_the_allocator_gives(changes, ranks):
    """Temporaries and communication included, which are estimates; states are here a third of all."""
    config = tree(model={"hidden_size": 128, "intermediate_size": 352, "vocab_size": 1000}, **changes)
    planned = [each for each in estimate(from_dict(config), 2, "cpu") for _ in each.ranks]
    for each, allocated in zip(planned, ranks.run(2, jobs_memory.most_allocated, config), strict=True):
        assert each.total == pytest.approx(each.states.device + allocated, rel=0.1)


# ---- states: built on the meta device

BUILT = {
    "one process": {},
    "fp32 masters are the weights": {"dp": 4, "train": {"precision": "fp32"}},
    "tied, two copies": {"pp": 2, "dp": 2, "model": {"tie_word_embeddings": True}},
    "tied, one copy": {"pp": 2, "dp": 2, "schedule": "zb-v", "zero": 2, "model": {"tie_word_embeddings": True}},
    "modules ahead, a copy of the embedding": {"pp": 2, "dp": 2, "model": {"mtp_layers": 2}},
    "a module ahead, one table": {"pp": 2, "dp": 2, "schedule": "zb-v", "zero": 3, "model": {"mtp_layers": 1}},
    "ZeRO-0": {"dp": 4, "zero": 0},
    "ZeRO-2 in bf16": {"dp": 4, "zero": 2, "train": {"grad_dtype": "bf16"}},
    "ZeRO-3 in groups": {"dp": 8, "zero": 3, "dp_shard": 2, "tp": 2},
    "replicated key-value heads": {"tp": 4, "dp": 2, "sequence_parallel": True},
    "offloaded": {"dp": 2, "offload": "cpu", "train": {"precision": "fp32"}},
    "offloaded weights": {"dp": 2, "zero": 3, "offload_parameters": True, "train": {"precision": "fp32"}},
    "all offloaded": {"dp": 2, "zero": 3, "offload": "cpu", "offload_parameters": True, "train": {"precision": "fp32"}},
    "compressed": {"dp": 2, "powersgd_rank": 2, "tp": 2},
    "compressed, experts": {"dp": 4, "powersgd_rank": 2, "ep": 2, "model": EXPERTS},
    "compressed, experts on one rank": {"dp": 4, "powersgd_rank": 2, "ep": 4, "model": EXPERTS},
    "adapters": {"dp": 2, "tp": 2, "lora": LORA},
    "adapters, ZeRO-3": {"dp": 2, "zero": 3, "offload": "cpu", "lora": SOME},
    "DoRA, tied": {"pp": 2, "dp": 2, "tp": 2, "lora": DORA, "model": {"tie_word_embeddings": True}},
    "Muon": {"dp": 4, "tp": 2, "optimizer": "muon"},
    "Muon, ZeRO-3, groups": {
        "dp": 4,
        "zero": 3,
        "dp_shard": 2,
        "model": {"tie_word_embeddings": True},
        "optimizer": "muon",
    },
    "AdamW in bf16, offloaded": {"dp": 2, "tp": 2, "offload": "cpu", "moments": "bf16"},
    "AdEMAMix in 8 bits, ZeRO-3, a copy of the state": {
        **{"pp": 2, "dp": 2, "zero": 3, "schedule": "zb-h2", "model": BLOCKS | {"head_dim": 64}},
        **{"optimizer": "ademamix", "moments": "8bit"},
    },
    "Muon and AdamW in 8 bits": {"dp": 4, "tp": 2, "model": BLOCKS, "optimizer": "muon", "moments": "8bit"},
    "Muon, a copy of the state": {"pp": 2, "dp": 2, "schedule": "zb-h2", "optimizer": "muon"},
    "weights in fp32, whole": {"pp": 2, "dp": 2, "model": DECAYS},
    "weights in fp32, sharded, offloaded": {
        **{"dp": 4, "zero": 3, "dp_shard": 2, "offload": "cpu", "offload_parameters": True, "model": DECAYS},
    },
    "weights in fp32, frozen": {"dp": 2, "zero": 3, "model": DECAYS, "lora": SOME},
    "fp8, ZeRO-3, groups": {"dp": 4, "zero": 3, "dp_shard": 2, "model": BLOCKS, "train": {"fp8": "block"}},
    "fp8, ZeRO-3, frozen, offloaded state": {
        **{"dp": 3, "zero": 3, "offload": "cpu", "model": BLOCKS, "train": {"fp8": "block", "global_batch_size": 24}},
        "lora": SOME,
    },
    "fp8, ZeRO-3, experts": {"dp": 4, "ep": 2, "zero": 3, "model": BLOCKS | CODED_EXPERTS, "train": {"fp8": "block"}},
    "fp16, interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved", "train": {"precision": "fp16"}},
}


def bf16(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return tree(**{**case, "train": {"global_batch_size": 16, "precision": "bf16", **case.get("train", {})}})


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("case", BUILT)
def test_states_are_what_is_built(case, device):
    config = from_dict(bf16(BUILT[case]))
    world = build.layout(config).world
    meta.check_states(config, sorted({0, world // 2, world - 1}), device)


def test_a_tied_tensor_has_two_accumulators_where_order_counts():
    config = from_dict(
        {**bf16({"dp": 2, "zero": 2, "model": {"tie_word_embeddings": True}}), "run": {"deterministic": True}}
    )
    meta.check_states(config, [0, 1], "cuda")
    loose = from_dict(bf16({"dp": 2, "zero": 2, "model": {"tie_word_embeddings": True}}))
    apart, shared = (estimate(each, 2)[0].gradients for each in (config, loose))
    # two whole buffers of the table instead of half of one, in fp32
    assert apart - shared == 4 * (2 * 104 * 32 - 104 * 32 / 2)


def test_codes_are_those_of_the_layers_of_a_rank_and_of_its_zero_stage():
    """Ranks with alike layers, and layouts that a search compares, share what is computed from their buckets."""
    shared: dict[Hashable, list[BucketLayout]] = {}
    for zero in (1, 3):
        config = from_dict(
            tree(
                model=BLOCKS | {"num_hidden_layers": 6},
                train={"precision": "bf16", "fp8": "block", "fp8_first_last": 2},
                **{"pp": 6, "dp": 2, "zero": zero},
            )
        )
        planned = estimate(config, 12)
        # out, in and down; and of the rows of qkv, which are gathered in bf16, those of q
        codes, scales, q = 128 * 128 + 512 * 128 + 128 * 256, 4 * (1 + 4 + 2), 128 * 128 + 4
        kept = codes + scales + q if zero == 1 else 0
        assert [each.states.codes for each in planned][1:5] == [0, kept, kept, 0]  # a rank has a layer
        more = planned[2].states.weights - planned[1].states.weights
        assert more == pytest.approx(codes / 2 + scales if zero == 3 else 0, abs=2 * 128)  # padding
        of_codes = ["fp8 (block): 8 matrices of 2 layers, of which ZeRO-3 gathers the codes of 6"]
        lines = [line.partition("; these")[0] for line in describe_fp8(config)]
        assert (lines == of_codes) is (zero == 3)
        config = resolve_layout(config, 12)
        schedule = plan.schedule(config, ParallelDims.of(config).microbatches)
        activations = Activations(config)
        for rank in range(6):
            of_rank = [Standing(config, schedule, activations, each).of(rank) for each in (shared, {})]
            assert of_rank[0] == of_rank[1]


@pytest.mark.parametrize("kv_heads, gradients", [(2, True), (1, False)])
def test_gradients_of_heads_that_ranks_share_are_not_in_fp8(kv_heads, gradients):
    """Each has its own queries' part of the gradient of a key-value head."""
    shape = {"hidden_size": 512, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    config = from_dict(tree(tp=2, model=shape, train={"precision": "bf16", "fp8": "block"}))
    (line,) = describe_fp8(config)
    assert ("gradients of these keep bf16" in line and "attention.qkv.weight" in line) is not gradients


# ---- traffic: a step over torch's fake process group, which sends nothing and can be watched


class Sent(TorchDispatchMode):
    """Adds up the bytes that rings send for the collectives of c10d."""

    bytes = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            parts = [part for each in args for part in (each if isinstance(each, list | tuple) else [each])]
            size = max(part.nbytes for part in parts if isinstance(part, torch.Tensor))
            group = next(
                torch.distributed.ProcessGroup.unbox(part) for part in parts if isinstance(part, torch.ScriptObject)
            )
            name = function._schema.name.removeprefix("c10d::")
            whole = ring(size, group.size())
            self.bytes += {"allreduce_": 2 * whole, "send": size, "recv_": 0}.get(name, whole)
        return function(*args, **(kwargs or {}))


TRAFFIC = {
    "tp": {"tp": 4},
    "tp and sp, recomputed": {"tp": 2, "sequence_parallel": True, "train": {"recompute": "full"}},
    "tp and sp, fp8": {"tp": 2, "sequence_parallel": True, "model": BLOCKS, "train": {"fp8": "block"}},
    "tp and sp, weight gradients in fp8": {"tp": 2, "sequence_parallel": True, "model": BLOCKS, "train": FP8_GRADIENTS},
    "tp and sp, fp8, recomputed, some adapters": {
        **{"tp": 2, "sequence_parallel": True, "model": BLOCKS, "lora": FEW},
        "train": {"fp8": "mxfp8", "fp8_first_last": 1, "recompute": "full"},
    },
    "ZeRO-0": {"dp": 2, "zero": 0},
    "ZeRO-2": {"dp": 2, "zero": 2},
    "ZeRO-1 in groups": {"dp": 4, "zero": 1, "dp_shard": 2},
    "ZeRO-3": {"dp": 2, "zero": 3},
    "ZeRO-3, kept": {"dp": 2, "zero": 3, "zero3_reshard": "step"},
    "rounded": {"dp": 2, "reduce_dtype": "bf16"},
    "compressed": {"dp": 2, "powersgd_rank": 2},
    "compressed, experts": {"dp": 2, "powersgd_rank": 2, "model": EXPERTS},
    "pp, tied": {"pp": 2, "model": {"tie_word_embeddings": True}},
    "pp, folded": {"pp": 2, "schedule": "zb-v"},
    "tp, adapters": {"tp": 2, "lora": LORA},
    "tp and sp, adapters": {"tp": 2, "sequence_parallel": True, "lora": SOME, "train": {"recompute": "full"}},
    "ZeRO-3, adapters": {"dp": 2, "zero": 3, "lora": LORA},
    "ZeRO-3, fp8": {
        **{"dp": 4, "zero": 3, "dp_shard": 2, "model": BLOCKS, "train": {"fp8": "block", "precision": "bf16"}}
    },
    "ZeRO-3, fp8, kept, adapters": {
        **{"dp": 2, "zero": 3, "zero3_reshard": "step", "model": BLOCKS, "train": {"fp8": "block"}},
        "lora": {"rank": 4, "modules_to_save": ["norms"]},
    },
    "tp and sp, DoRA, recomputed": {"tp": 2, "sequence_parallel": True, "lora": DORA, "train": {"recompute": "full"}},
    "pp, tied and trained, DoRA": {"pp": 2, "model": {"tie_word_embeddings": True}, "lora": DORA},
    "cp, ulysses": {"cp": 4, "tp": 2, "train": {"recompute": "full"}, "model": {"num_attention_heads": 8}},
    "cp, gather": {"cp": 2, "context": "gather", "zero": 2},
    "cp, ulysses, heads by layer": {"cp": 2, "tp": 2, "model": SHAPES | {"value_head_dim": 6}},
    "cp, ulysses within a ring": {
        "cp": 4,
        "context": "ring",
        "context_inner": 2,
        "model": {"num_key_value_heads": 1},
        "train": {"recompute": "full"},
    },
    "cp, ring, padded rows": {"cp": 3, "context": "ring", "dp": 2},
    "pp, tied, adapters": {"pp": 2, "model": {"tie_word_embeddings": True}, "lora": LORA},
    "tp, latents": {"tp": 2, "model": LATENTS, "train": {"recompute": "full"}},
    "tp, modules ahead": {"tp": 2, "model": {"mtp_layers": 2}, "train": {"recompute": "full"}},
    "cp, tp and sp, a module ahead": {
        "cp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "zero": 0,
        "model": {"mtp_layers": 1},
    },
    "tp and sp, latents": {"tp": 2, "sequence_parallel": True, "model": QUERIES},
    "cp, gather, latents": {"cp": 2, "context": "gather", "model": LATENTS},
    "cp, ring, tp, latents, recomputed": {
        "cp": 2,
        "context": "ring",
        "tp": 2,
        "model": LATENTS,
        "train": {"recompute": "attention"},
    },
    "cp, gather, tp and sp, latents, recomputed": {
        **{
            "cp": 2,
            "context": "gather",
            "tp": 2,
            "sequence_parallel": True,
            "zero": 0,
            "model": QUERIES,
            "train": {"recompute": "full"},
        }
    },
    "cp, ulysses, latents": {"cp": 2, "model": LATENTS},
    "tp, indexers": {"tp": 2, "model": SHARING},
    "tp and sp, indexers": {"tp": 2, "sequence_parallel": True, "model": SHARING},
    "cp, gather, tp and sp, indexers": {
        **{"cp": 2, "context": "gather", "tp": 2, "sequence_parallel": True, "zero": 0, "model": SHARING}
    },
    "cp, ulysses, indexers": {"cp": 2, "model": SHARING},
    "cp, tp and sp, states passed": {
        **{"cp": 2, "context": "gather", "tp": 2, "sequence_parallel": True, "zero": 0, "model": DELTA}
    },
    "cp, states with a decay by channel, recomputed": {
        **{"cp": 4, "context": "ring", "model": KIMI, "train": {"recompute": "mixer"}}
    },
    "cp, heads of a recurrence exchanged, recomputed": {"cp": 4, "model": DELTA, "train": {"recompute": "full"}},
    "cp, convolution": {"cp": 2, "context": "gather", "model": CONVOLUTION, "train": {"recompute": "mixer"}},
    **{
        f"a reference model, {name}": {"lora": {"rank": 4}, "train": {"objective": "dpo", **train}, **layout}
        for name, layout, train in (
            ("tp and sp, recomputed", {"tp": 2, "sequence_parallel": True}, {"recompute": "full"}),
            ("pp, ZeRO-3", {"pp": 2, "dp": 2, "zero": 3}, {}),
            ("DoRA, tp, mismatches", {"tp": 2, "lora": {"rank": 4, "dora": True}}, {"objective": "kto"}),
        )
    },
    "a reward model, tp": {"tp": 2, **REWARD},
    "a reward model, pp, ZeRO-3, adapters": {"pp": 2, "dp": 2, "zero": 3, "lora": {"rank": 4}, **REWARD},
    "an objective over sequences": {"tp": 2, "train": {"objective": "simpo"}},
    "ZeRO-1, weights in fp32": {"dp": 2, "model": DECAYS, "train": {"precision": "bf16"}},
    "ZeRO-3, weights in fp32": {"dp": 2, "zero": 3, "model": DECAYS, "train": {"precision": "bf16"}},
}


@pytest.mark.parametrize("case", TRAFFIC)
def test_traffic_is_what_a_step_sends(case, monkeypatch):
    config = tree(**TRAFFIC[case])
    run_config = from_dict(config)
    with meta.fake_process(0, build.layout(run_config).world), Sent() as sent:
        mesh = Mesh(build.layout(run_config), **build.mesh_options(run_config))
        monkeypatch.setattr(jobs_memory, "mesh_of", lambda context, config: mesh)
        stepping = jobs_memory.Stepping(None, config)
        sent.bytes = 0.0  # the initial weights were gathered
        stepping.step(1)
    planned = traffic(run_config, build.layout(run_config).world)[0]
    assert sum(planned.to_dict().values()) == pytest.approx(sent.bytes, rel=1e-9)


BY_AXIS = {  # layout → bytes over its axis, as docs/topology.md writes them, of m microbatches
    "tp": ({"tp": 8}, lambda layers, message, parameters, m: 8 * layers * m * message * 7 / 8),
    "tp and sp": (
        {"tp": 8, "sequence_parallel": True},
        lambda layers, message, parameters, m: 10 * layers * m * message * 7 / 8,
    ),
    "ZeRO-0": ({"dp": 8, "zero": 0}, lambda layers, message, parameters, m: 8 * parameters * 7 / 8),
    "ZeRO-1": ({"dp": 8, "zero": 1}, lambda layers, message, parameters, m: 6 * parameters * 7 / 8),
    "ZeRO-2": ({"dp": 8, "zero": 2}, lambda layers, message, parameters, m: (4 * m + 2) * parameters * 7 / 8),
    "ZeRO-3": ({"dp": 8, "zero": 3}, lambda layers, message, parameters, m: (4 * m + 4 * m) * parameters * 7 / 8),
    "kept": (
        {"dp": 8, "zero": 3, "zero3_reshard": "step"},
        lambda layers, message, parameters, m: (4 * m + 2) * parameters * 7 / 8,
    ),
    "rounded": (
        {"dp": 8, "zero": 1, "reduce_dtype": "bf16"},
        lambda layers, message, parameters, m: 4 * parameters * 7 / 8,
    ),
    "pp": ({"pp": 4}, lambda layers, message, parameters, m: 2 * m * message),
    "pp, two stages": (
        {"pp": 4, "schedule": "interleaved", "virtual_stages": 2},
        lambda layers, message, parameters, m: 4 * m * message,
    ),
}


@pytest.mark.parametrize("case", BY_AXIS)
def test_the_documented_bytes_of_each_axis(case):
    """Of a middle rank, but for a few percent of what embedding, head and the last layer do otherwise."""
    changes, documented = BY_AXIS[case]
    given = {"model": preset("llama-3-8b"), "data": {"sequence_length": 2048}, "parallel": {"dp": 1, **changes}}
    config = from_dict(
        {**given, "train": {"precision": "bf16", "micro_batch_size": 1, "global_batch_size": 8 * changes.get("dp", 1)}}
    )
    world = build.layout(config).world
    sent = traffic(config, world)[config.parallel.pp // 2].to_dict()
    expected = documented(32, 2048 * 4096 * 2, parameter_count(model_specs(config.model)), 8)
    assert sum(sent.values()) == sent[next(iter(changes))] == pytest.approx(expected, rel=0.04)
