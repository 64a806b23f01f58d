"""The space of layouts with latent attention or attention sinks, and with routers that have groups or biases."""

from __future__ import annotations

from typing import Any

from tests.support.configs import config_of, config_of_one_process, staged, with_fewer_rows
from tests.support.jobs_experts import BASE, MIXTURE
from tests.support.spaces.layouts import stages
from tests.support.spaces.space import Case, Configs, Space, world

OPTIONS: dict[str, tuple[Any, ...]] = {
    "attention": ("latent", "two_latents", "sinks"),
    "feed_forward": ("dense", "sums", "maxima", "biases"),  # of a router: how groups are chosen
    "tp": (1, 2),
    "sequence_parallel": (False, True),
    "context": ("none", "ulysses", "gather", "ring", "pairs"),  # of two ranks; pairs: of four, a ring of two pairs
    "schedule": ("whole", "1f1b", "zb-v"),
    "dp": (1, 2),
    "ep": (1, 2),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full", "operations"),
    "documents": (False, True),
    "window": (None, 5),  # in every second layer
    "dropout": (0.0, 0.1),
    "modules": (0, 1),  # of multi-token prediction
    "optimizer": ("adamw", "muon"),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
YARN |= {"beta_fast": 4, "beta_slow": 1, "attention_factor": 1.1}
LATENTS = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENTS |= {"num_key_value_heads": None}
FACTORS = {"query_scale_beta": 0.7, "query_scale_positions": 3}  # on queries, from the fourth token on
ATTENTION: dict[str, dict[str, Any]] = {
    "latent": LATENTS,
    "two_latents": LATENTS | {"q_lora_rank": 16, "attention_scale": 0.5, "rope_scaling": YARN} | FACTORS,
    "sinks": {"attention_sinks": True, "attention_bias": True, "attention_out_bias": True, "initializer_range": 0.3}
    | FACTORS,
}
GROUPS = MIXTURE | {"num_experts": 8, "n_group": 4, "topk_group": 2}
GROUPS |= {"routed_scaling_factor": 2.5, "shared_expert_gate": False}
BIAS = {"router_balance": "bias", "router_bias_rate": 0.01}
FEED_FORWARD: dict[str, dict[str, Any]] = {
    "dense": {},
    "sums": GROUPS | BIAS | {"router_scores": "sigmoid"},  # DeepSeek-V3
    "maxima": GROUPS | {"norm_topk_prob": False, "router_balance": "sequence"},  # DeepSeek-V2
    "biases": {  # gpt-oss
        **{"num_experts": 4, "moe_intermediate_size": 24, "router_logit_bias": True, "mlp_bias": True},
        **{"hidden_act": "clamped_swiglu", "router_aux_loss_coef": 0.02, "initializer_range": 0.2},
    },
}
V3 = ATTENTION["two_latents"] | FEED_FORWARD["sums"]


def sizes(case: Case) -> Case:
    inner = 2 if case["context"] == "pairs" else 1
    method = "ring" if inner == 2 else case["context"]
    return {
        **case,
        **staged(case["schedule"]),
        "cp": 1 if method == "none" else 2 * inner,
        "context": method,
        "context_inner": inner,
    }


def is_legal(case: Case) -> bool:
    """At most 8 ranks; experts need sequence parallelism under tp; ep needs experts and an even number of ranks."""
    full, dense = sizes(case), case["feed_forward"] == "dense"
    whole = case["sequence_parallel"] == (case["tp"] > 1) or (dense and case["tp"] > 1)
    exchanged = case["ep"] == 1 or (not dense and full["tp"] * full["dp"] * full["cp"] % 2 == 0)
    return world(full) <= 8 and whole and exchanged


def complete(case: Case) -> Case:
    full = {**BASE, **sizes(case), "masked": case["documents"]}
    return {**full, "layers": max(stages(full), 2)}


def configs(case: Case, prefix: str) -> Configs:
    full = complete(case)
    several, one = config_of(full, prefix, "fp64"), config_of_one_process(full, prefix)
    several["parallel"] |= {"ep": case["ep"]}
    with_fewer_rows(several, one)
    layers = list(range(0, full["layers"], 2)) if case["window"] else None
    for config in (several, one):
        config["model"] |= ATTENTION[case["attention"]] | FEED_FORWARD[case["feed_forward"]]
        config["model"] |= {
            "sliding_window": case["window"],
            "sliding_window_layers": layers,
            "mtp_layers": case["modules"],
        }
    return several, one


SPACE = Space(
    name="attention",
    options=OPTIONS,
    bound=("feed_forward", "tp", "sequence_parallel", "context", "schedule", "dp", "ep"),
    is_legal=is_legal,
    model=("attention", "feed_forward", "documents", "window", "dropout", "modules", "optimizer", "layers"),
    complete=complete,
    configs=configs,
)
