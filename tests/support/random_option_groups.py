"""Further options of random configurations, in groups such as attention, experts and adapters.

Each group is drawn from a generator of its own, so that a new group leaves the others of a seed as they were.
"""

from __future__ import annotations

from random import Random
from typing import Any

from megalite.config.recompute import OPERATIONS

Options = dict[str, Any]


def further_options(seed: int, options: Options) -> Options:
    """Legal options of a run with `options`, some of which they replace."""
    chosen = dict(options)
    for name, choose in GROUPS.items():
        chosen |= choose(Random(f"{name} of {seed}"), chosen)
    return chosen


def _attention(random: Random, options: Options) -> Options:
    """A quarter of the models have latents, an eighth has sinks."""
    kind = random.choice(("plain",) * 5 + ("latent", "latent", "sinks"))
    if kind != "latent":
        return {"model.attention_sinks": True} if kind == "sinks" else {}
    rotating = (2, 4, 6) if options["model.position"] == "rope" else (1, 3, 4)
    return {
        "model.kv_lora_rank": random.randint(1, 12),
        "model.q_lora_rank": random.choice((None, random.randint(1, 12))),
        "model.qk_nope_head_dim": random.randint(1, 8),
        "model.qk_rope_head_dim": random.choice(rotating),
        "model.v_head_dim": random.randint(1, 9),
        "model.num_key_value_heads": None,
        "model.head_dim": None,
        "model.qk_norm": "none",
        "model.attention_bias": False,
        "model.attention_out_bias": False,
    }


def _context(random: Random, options: Options) -> Options:
    """Context parallelism on the ranks that are left."""
    tp, heads, kv = options["parallel.tp"], options["model.num_attention_heads"], options["model.num_key_value_heads"]
    cp = random.randint(1, 8 // (tp * options["parallel.pp"] * options["parallel.dp"]))
    heads, kv = heads // tp, max((kv or heads) // tp, 1)

    def whole(ranks: int) -> bool:
        return heads % ranks == 0 and (kv % ranks == 0 or ranks % kv == 0)

    method = random.choice(("gather", "ring", "auto", *(["ulysses"] if whole(cp) else [])))
    inner = [ranks for ranks in range(1, cp) if cp % ranks == 0 and whole(ranks)] if method == "ring" else []
    return {
        "parallel.cp": cp,
        "parallel.context": method,
        "parallel.context_parts": "zigzag" if method == "ulysses" else random.choice(("zigzag", "balanced")),
        "parallel.context_inner": random.choice(inner or [1]),
    }


def _experts(random: Random, options: Options) -> Options:
    """A third of the models have experts."""
    if random.random() < 0.65:
        return {}
    choose, tp, layers = random.choice, options["parallel.tp"], options["model.num_hidden_layers"]
    data = options["parallel.dp"] * options["parallel.cp"]
    shard = (options["parallel.dp_shard"] or data) if options["parallel.zero"] else data
    ep = choose([n for n in range(1, data * tp + 1) if data * tp % n == 0 and shard * tp % n == 0])
    experts = ep * random.randint(1, max(8 // ep, 1))
    act, gated = options["model.hidden_act"], options["model.gated_mlp"]
    return {
        "parallel.sequence_parallel": tp > 1 or options["parallel.sequence_parallel"],
        "parallel.ep": ep,
        "parallel.expert_dispatch": choose(("all_to_all", "all_gather")),
        "model.num_experts": experts,
        "model.moe_intermediate_size": choose((None, random.randint(1, 16))),
        "model.hidden_act": choose((act, "clamped_swiglu")) if gated else act,
        "model.shared_expert_intermediate_size": choose((None, tp * random.randint(1, 6))),
        "model.shared_expert_gate": choose((True, False)),
        "model.expert_capacity_factor": choose((None, None, 0.5, 1.0)),
        **_mixtures(random, layers),
        **_router(random, experts),
    }


def _mixtures(random: Random, layers: int) -> Options:
    """Which layers are mixtures: at least one."""
    step = random.choice((1, 1, 2))
    mixtures = [layer for layer in range(layers) if (layer + 1) % step == 0]
    dense = sorted(random.sample(mixtures, random.randint(0, len(mixtures) - 1))) if mixtures else []
    return {"model.decoder_sparse_step": step if mixtures else 1, "model.mlp_only_layers": dense or None}


def _router(random: Random, experts: int) -> Options:
    choose = random.choice
    scores, balance = choose(("softmax", "sigmoid")), choose(("global", "sequence", "bias"))
    smallest = 2 if scores == "sigmoid" else 1  # a group's score is the sum of its two best
    groups = choose([None, *(n for n in range(2, experts + 1) if experts % n == 0 and experts // n >= smallest)])
    chosen = random.randint(1, groups) if groups else 1
    return {
        "model.router_scores": scores,
        "model.router_balance": balance,
        "model.router_aux_loss_coef": choose((0.0, 0.02)),
        "model.router_z_loss_coef": choose((0.0, 0.01)),
        "model.router_bias_rate": choose((0.001, 0.1)),
        "model.router_logit_bias": choose((True, False)),
        "model.n_group": groups,
        "model.topk_group": chosen,
        "model.num_experts_per_tok": random.randint(1, min(experts // (groups or 1) * chosen, 4)),
        "model.norm_topk_prob": choose((True, False)),
        "model.routed_scaling_factor": choose((1.0, 2.5)),
        "model.group_score": choose(("auto", "largest")) if groups else "auto",
    }


def _adapters(random: Random, options: Options) -> Options:
    """A quarter of the models are frozen and have adapters."""
    if random.random() < 0.75:
        return {}
    latent = "model.kv_lora_rank" in options
    queries = ["q_a", "q_b"] if latent and options["model.q_lora_rank"] else ["q"]
    attention = [*queries, "kv_a", "kv_b", "o"] if latent else ["q", "k", "v", "o"]
    roles = [*attention, "up", "down", *(["gate"] if options["model.gated_mlp"] else [])]
    adapters = {
        "lora.rank": random.randint(1, 5),
        "lora.alpha": random.choice((1.0, 8.0)),
        "lora.dropout": random.choice((0.0, 0.0, 0.3)),
        "lora.targets": random.choice((None, random.sample(roles, random.randint(1, len(roles))))),
        "lora.scaling": random.choice(("standard", "rslora")),
        "lora.dora": random.choice((False, True)),
        "lora.base": random.choice(("none", "none", "nf4", "int8")),
        "lora.modules_to_save": random.choice((None, ["embedding"], ["embedding", "head", "norms"])),
    }
    if "model.num_experts" in options and adapters["lora.targets"]:
        # attention too: every feed-forward may be a mixture of experts
        adapters["lora.targets"] = sorted({*adapters["lora.targets"], random.choice(attention)})
        if random.random() < 0.5:
            adapters["lora.targets"] += ["experts.in", "experts.down"]
            adapters |= {"lora.dropout": 0.0, "lora.dora": False}
    return adapters


def _modules(random: Random, options: Options) -> Options:
    """A quarter of the models that may have modules of multi-token prediction."""
    fits = (
        options["model.position"] != "learned" and options["model.logit_scale"] is None and "lora.rank" not in options
    )
    most = min(options["data.sequence_length"] - 1, 2)
    if random.random() < 0.75 or not fits or not most:
        return {}
    return {"model.mtp_layers": random.randint(1, most), "train.mtp_weight": random.choice((0.1, 1.0))}


def _muon(random: Random, options: Options) -> Options:
    """A quarter of the runs that may have it."""
    if random.random() < 0.75 or "lora.rank" in options or options["parallel.offload"] != "none":
        return {}
    return {
        "optimizer.name": "muon",
        "muon.lr": random.choice((1e-3, 5e-3)),
        "muon.momentum": random.choice((0.0, 0.95)),
        "muon.nesterov": random.choice((True, False)),
        "muon.ns_steps": random.choice((1, 5)),
        "muon.ns_dtype": "compute",
        "muon.weight_decay": random.choice((0.0, 0.1)),
        "muon.adjust_lr": random.choice(("original", "match_rms_adamw")),
    }


def _average(random: Random, options: Options) -> Options:
    """A quarter of the runs that may have one, half of them validate with it."""
    if random.random() < 0.75 or options["parallel.offload"] == "disk":
        return {}
    return {
        "train.ema_decay": 0.8,
        "validation.ema": options["validation.interval"] is not None and random.random() < 0.5,
    }


def _operations(random: Random, options: Options) -> Options:
    """A fifth of the runs names the operations that it recomputes, of all layers or of each."""
    if random.random() < 0.8:
        return {}

    named = [name for name in OPERATIONS if name != "experts" or "model.num_experts" in options]

    def mode() -> str:
        some = random.sample(named, random.randint(1, 4))
        return random.choice(("none", "full", "selective", "+".join(some), "+".join(some)))

    layers = options["model.num_hidden_layers"] + options.get("model.mtp_layers", 0) if random.random() < 0.5 else 1
    return {"train.recompute": ",".join(mode() for _ in range(layers))}


def _gates(random: Random, options: Options) -> Options:
    """A fifth of the models that may have them have gates on the output of attention."""
    excluded = options.get("model.kv_lora_rank") or options.get("model.attention_sinks")
    return {} if excluded or random.random() < 0.8 else {"model.attention_gate": True}


def _query_factors(random: Random, options: Options) -> Options:
    """A fifth of the models that may have them have factors on queries."""
    if options["model.position"] != "rope" or options["model.no_rope_layers"] or random.random() < 0.8:
        return {}
    return {"model.query_scale_beta": random.choice((0.1, 1.0)), "model.query_scale_positions": random.randint(1, 9)}


def _norms(random: Random, options: Options) -> Options:
    """A fifth of the models have a norm of the embedding, as many have norms without weights; a third of those with
    rotated and normed heads norm them after the rotation, and a third of plain feed-forwards have xIELU."""
    own: Options = {}
    if random.random() < 0.2 and not options.get("model.mtp_layers"):
        own["model.embedding_norm"] = True
    if random.random() < 0.2:
        own |= {"model.norm_weight": False}
        own |= {"model.norm_bias": False} if options["model.norm"] == "layer" else {}
    if options["model.qk_norm"] != "none" and options["model.position"] == "rope" and random.random() < 0.3:
        own["model.qk_norm_after_rope"] = True
    if options["model.qk_norm"] == "head" and random.random() < 0.3:
        own["model.qk_norm_weight"] = False
    if not options["model.gated_mlp"] and "model.num_experts" not in options and random.random() < 0.3:
        own["model.hidden_act"] = "xielu"
    return own


GROUPS = {
    "attention": _attention,
    "query factors": _query_factors,
    "gates": _gates,
    "context": _context,
    "experts": _experts,
    "adapters": _adapters,
    "modules": _modules,
    "muon": _muon,
    "average": _average,
    "operations": _operations,
    "norms": _norms,
}
"""By the name of their generators, in the order in which they are drawn: later groups read what earlier ones have
chosen."""
