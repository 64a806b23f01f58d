"""Megatron-LM's arguments for mixtures of experts.

Its losses are summed over the layers, with shares that add up to 1; here they are averaged over the mixtures,
with shares that add up to a token's number of experts.
"""

from __future__ import annotations

from typing import Any

from megalite.importers.megatron_patterns import hybrid_layers, marked_layers
from megalite.importers.verdict import (
    ImportedFile,
    KeyRule,
    Table,
    Verdict,
    each,
    harmless,
    honoured,
    lost,
    missing,
    never,
    only,
    rounded,
    sets,
    word,
)

BIAS, TYPE, LOSS = "moe-router-enable-expert-bias", "moe-router-load-balancing-type", "moe-aux-loss-coeff"
SHARED, TOPK, GROUPS, BEST_GROUPS = (
    "moe-shared-expert-intermediate-size",
    "moe-router-topk",
    "moe-router-num-groups",
    "moe-router-group-topk",
)
BALANCES = {"AUX_LOSS": "global", "GLOBAL_AUX_LOSS": "global", "SEQ_AUX_LOSS": "sequence"}
SWITCHES = frozenset(
    (
        BIAS,
        "moe-router-pre-softmax",
        "moe-grouped-gemm",
        "moe-use-legacy-grouped-gemm",
        "moe-permute-fusion",
        "moe-router-fusion",
    )
    + (
        "moe-shared-expert-overlap",
        "moe-shared-expert-gate",
        "moe-per-layer-logging",
        "moe-layer-recompute",
        "moe-enable-deepep",
    )
    + (
        "moe-pad-expert-input-to-capacity",
        "moe-extended-tp",
        "moe-use-upcycling",
        "moe-router-force-load-balancing",
    )
)


def _mixtures(source: ImportedFile) -> int | None:
    """Return the number of layers with experts, or None if it is not known."""
    if letters := hybrid_layers(source):
        return letters.count("E")
    layers = source.size("num-layers")
    mixtures = marked_layers(source.get("moe-layer-freq", 1), layers) if layers else None
    return sum(mixtures) if mixtures else None


def _layers(value: Any, source: ImportedFile) -> Verdict:
    if hybrid_layers(source):
        return harmless("determined by the pattern of layers")
    layers = source.size("num-layers")
    mixtures = marked_layers(value, layers) if layers else None
    if mixtures is None:
        return lost("set model.mlp_only_layers to the layers without experts")
    dense = [layer for layer, mixture in enumerate(mixtures) if not mixture]
    return (
        honoured({"model.mlp_only_layers": dense})
        if dense
        else harmless("experts in every layer are the default")
    )


def _kind(value: Any) -> str:
    """Return the kind of balance, which may be a list of one."""
    return word(value[0] if isinstance(value, list) and len(value) == 1 else value)


def _loss(value: Any, source: ImportedFile) -> Verdict:
    kind, layers = _kind(source.get(TYPE, "aux_loss")), _mixtures(source)
    if type(value) in (int, float) and value == 0:
        return harmless("no auxiliary loss, which is the default")
    if kind == "NONE":
        return harmless(f"{TYPE} is none")
    if source.on(BIAS):
        return lost("model.router_balance: bias does not use an auxiliary loss")
    if kind not in BALANCES or type(value) not in (int, float):
        return lost(
            "only one auxiliary loss is supported: set model.router_balance and model.router_aux_loss_coef"
        )
    if layers is None:
        return lost(
            f"set model.router_aux_loss_coef to {value} * the number of layers with experts / "
            "model.num_experts_per_tok"
        )
    topk = source.count(TOPK, 2)
    if topk is None:
        return lost(
            f"set model.router_aux_loss_coef to {rounded(value * layers)} / model.num_experts_per_tok"
        )
    coefficient = rounded(value * layers / topk)
    options = {"model.router_aux_loss_coef": coefficient, "model.router_balance": BALANCES[kind]}
    return honoured(
        options, "" if kind == "SEQ_AUX_LOSS" else "the load is measured over all ranks in the previous step"
    )


def _balance(value: Any, source: ImportedFile) -> Verdict:
    if source.on(BIAS):
        return harmless(f"{BIAS} decides")
    kind = _kind(value)
    if kind == "NONE":
        return harmless("no auxiliary loss, which is the default")
    if kind not in BALANCES:
        return lost("model.router_balance must be global, sequence or bias")
    return honoured({"model.router_balance": BALANCES[kind]})


def _bias(value: Any, source: ImportedFile) -> Verdict:
    return honoured({"model.router_balance": "bias"}) if value is True else harmless("disabled")


def _z_loss(value: Any, source: ImportedFile) -> Verdict:
    layers = _mixtures(source)
    if layers is None or type(value) not in (int, float):
        return lost(f"set model.router_z_loss_coef to {value} * the number of layers with experts")
    return honoured({"model.router_z_loss_coef": rounded(value * layers)})


def _shared(value: Any, source: ImportedFile) -> Verdict:
    if not value:
        return harmless("no shared expert, which is the default")
    return honoured(
        {
            "model.shared_expert_intermediate_size": value,
            "model.shared_expert_gate": source.on("moe-shared-expert-gate"),
        }
    )


def _probabilities(value: Any, source: ImportedFile) -> Verdict:
    """Map the order of softmax and top-k.

    If the softmax comes last, it is computed over the chosen experts, which divides their probabilities by
    their sum.
    """
    if source.word("moe-router-score-function", "softmax") == "SIGMOID":
        return harmless("the scores are sigmoids")
    return honoured({"model.norm_topk_prob": value is not True})


def _groups(value: Any, source: ImportedFile) -> Verdict:
    """Map the number of groups that a token may choose.

    Megatron-LM scores a group by the sum of its best experts, as many as a token has in each of its groups.
    """
    best = (source.count(TOPK, 2) or 0) // (source.count(BEST_GROUPS) or 1)
    here = 2 if source.word("moe-router-score-function", "softmax") == "SIGMOID" else 1
    same = best == here or source.size(BEST_GROUPS) == source.size(GROUPS)
    return honoured(
        {"model.n_group": value},
        "" if same else f"the score of a group is computed from its best {here} experts instead of {best}",
    )


def _with_experts(row: KeyRule) -> KeyRule:
    """Return a row of experts, which has no effect without --num-experts.

    If unknown arguments of a script may set --num-experts, the row applies.
    """

    def judge(value: Any, source: ImportedFile) -> Verdict:
        if source.get("num-experts", 0) in (0, None) and not source.unsettled():
            return harmless("num-experts is not set")
        return row.judge(value, source)

    return KeyRule(judge, row.option)


def _experts(value: Any, source: ImportedFile) -> Verdict:
    return (
        honoured({"model.num_experts": value}) if value != 0 else harmless("no experts, which is the default")
    )


FUSED, OVERLAP = "fused operations are selected by train.kernels", "always enabled"
_TABLE: Table = {
    "moe-expert-parallel-size": sets("parallel.ep"),
    "topk": sets("model.num_experts_per_tok"),
    "expert-model-parallel-size": sets("parallel.ep"),
    "expert-tensor-parallel-size": only(
        "1", "experts are not split: parallel.ep also distributes them over tp ranks"
    ),
    "moe-layer-freq": KeyRule(_layers, "model.mlp_only_layers"),
    "moe-ffn-hidden-size": sets("model.moe_intermediate_size"),
    SHARED: KeyRule(_shared, "model.shared_expert_intermediate_size"),
    "moe-shared-expert-gate": never("model.shared_expert_gate is set if there is a shared expert"),
    TOPK: sets("model.num_experts_per_tok"),
    "moe-router-score-function": sets(
        "model.router_scores",
        {"SOFTMAX": "softmax", "SIGMOID": "sigmoid"},
        "model.router_scores must be softmax or sigmoid",
    ),
    "moe-router-pre-softmax": KeyRule(_probabilities, "model.norm_topk_prob"),
    GROUPS: KeyRule(_groups, "model.n_group"),
    BEST_GROUPS: sets("model.topk_group"),
    "moe-router-topk-scaling-factor": sets("model.routed_scaling_factor"),
    TYPE: KeyRule(_balance, "model.router_balance"),
    LOSS: KeyRule(_loss, "model.router_aux_loss_coef"),
    "moe-z-loss-coeff": KeyRule(_z_loss, "model.router_z_loss_coef"),
    BIAS: KeyRule(_bias, "model.router_balance"),
    "moe-router-bias-update-rate": sets("model.router_bias_rate"),
    "moe-router-dtype": only(
        "FP32",
        "routers always compute in fp32, or in fp64 with train.precision: fp64",
        "routers compute in fp32",
    ),
    "moe-expert-capacity-factor": sets(
        "model.expert_capacity_factor",
        roughly="capacity applies to each sequence; tokens are kept by rank of the choice, then by position",
    ),
    "moe-token-drop-policy": never("determined by model.expert_capacity_factor"),
    "moe-pad-expert-input-to-capacity": never("padding does not affect the result"),
    "moe-token-dispatcher-type": sets(
        "parallel.expert_dispatch",
        {
            "ALLGATHER": "all_gather",
            "ALLTOALL": "all_to_all",
            "ALLTOALL_SEQ": "all_to_all",
            "FLEX": "all_to_all",
        },
        "parallel.expert_dispatch must be all_to_all or all_gather",
    ),
    **each(
        "moe-",
        "enable-deepep deepep-num-sms flex-dispatcher-backend",
        never("all_to_all has a single implementation"),
    ),
    **each("moe-", "grouped-gemm use-legacy-grouped-gemm permute-fusion router-fusion", never(FUSED)),
    "moe-shared-expert-overlap": never(OVERLAP),
    "moe-per-layer-logging": never("written to metrics.jsonl for each step"),
    "moe-layer-recompute": missing("the closest option is train.recompute: full, every-K or budget"),
    "moe-*": missing("no corresponding option"),
}
TABLE: Table = {
    "num-experts": KeyRule(_experts, "model.num_experts"),
    **{key: _with_experts(row) for key, row in _TABLE.items()},
    "mtp-*": missing("no corresponding option"),
}


def defaults(source: ImportedFile) -> dict[str, Any]:
    """Return the defaults of mixtures of experts that differ from megalite's; empty without experts."""
    if source.get("num-experts", 0) in (0, None):
        return {}
    values: dict[str, Any] = (
        {}
        if "topk" in source.leaves
        else {"topk": 1}
        if "moe-expert-parallel-size" in source.leaves
        else {TOPK: 2}
    )
    if (source.size("expert-model-parallel-size") or 1) > 1:
        values |= {"moe-token-dispatcher-type": "allgather"}
    if (tp := source.size("tensor-model-parallel-size") or 1) > 1:
        values |= {"expert-tensor-parallel-size": tp}
    return values
