"""Rows shared by projects that learn from preferences: objectives, their numbers, and their data."""

from __future__ import annotations

from typing import Any

from megalite.importers.verdict import (
    ImportedFile,
    KeyRule,
    Table,
    Verdict,
    each,
    harmless,
    honoured,
    left,
    lost,
    missing,
    never,
    only,
    rounded,
    word,
)

GENERATES = (
    "losses that generate text while they train (GRPO, RLOO, PPO, online DPO, Nash-MD, XPO, on-policy GKD) "
    "are not supported: train with TRL, verl, OpenRLHF or NeMo-RL, from a model of `megalite convert export`"
)
STORED = (
    "its files of a teacher's log-probabilities are not read: store the teacher's words with `megalite score "
    "--top_k`, and set distillation.teacher to scores:DIR"
)
LOSSES = (
    *("sigmoid", "hinge", "robust", "sigmoid_norm", "exo_pair", "discopop"),
    *("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down"),
)
"""Names of DPO's losses in TRL that preference.loss has, too."""
SMOOTHED = ("robust", "exo_pair")
"""Those that read label_smoothing in TRL."""
TRL_VERSION = "1.16"
"""The version of TRL whose losses these are."""
PAIRS = ("dpo", "ipo", "simpo", "cpo", "orpo", "reward")
REWARD = {"train.objective": "reward", "model.output_head": "reward"}


def listed(value: Any) -> list[Any]:
    """Return the entries of a list, or of a text that is separated by commas."""
    if isinstance(value, list):
        return value
    return [] if value is None else [part.strip() for part in str(value).split(",")]


def without_loss(objective: str, why: str) -> Verdict:
    """Return the verdict on a loss that does not exist here.

    The objective stays, so that its numbers and its data are judged as those of the other project.
    """
    return Verdict("lost", {"train.objective": objective}, why)


def dpo(names: Any, weights: Any) -> Verdict:
    """Map DPO's loss: a name, or several with weights, of which one may be the likelihood (sft)."""
    kinds = [str(name).lower() for name in listed(names)]
    factors = weights if isinstance(weights, list) else [1.0] * len(kinds)
    both = dict(zip(kinds, factors, strict=False))
    others = [kind for kind in kinds if kind != "sft"]
    if len(others) != 1 or len(both) < len(kinds):
        return without_loss("dpo", "one loss of pairs, alone or with sft, is supported: set preference.loss")
    (kind,) = others
    if kind != "ipo" and kind not in LOSSES:
        return without_loss(
            "dpo", f"a loss that is not supported: preference.loss is one of {', '.join(LOSSES)}"
        )
    if not both[kind]:
        return without_loss(
            "dpo",
            f"the weight of {kind} is 0, which leaves no loss of pairs: train on chosen completions alone",
        )
    options: dict[str, Any] = {"train.objective": "ipo"}
    if kind != "ipo":
        options = {"train.objective": "dpo", "preference.loss": kind}
    if "sft" in both:
        options["preference.nll_weight"] = rounded(both["sft"] / both[kind])
    alike = both[kind] == 1
    return honoured(options, "" if alike else f"without the factor {both[kind]} of the whole loss")


def smoothing(key: str) -> KeyRule:
    """Return the row of DPO's label smoothing, which TRL reads with two losses.

    Args:
        key: that of the loss.
    """

    def judge(value: Any, source: ImportedFile) -> Verdict:
        if any(name in SMOOTHED for name in listed(source.get(key))):
            return honoured({"preference.label_smoothing": value})
        if not value:
            return honoured({"preference.label_smoothing": 0.0})
        return lost(
            f"TRL {TRL_VERSION} reads it with {' and '.join(SMOOTHED)} only; set preference.label_smoothing "
            "to smooth sigmoid or sigmoid_norm"
        )

    return KeyRule(judge, "preference.label_smoothing")


def row_length(length: Any, pairs: bool) -> dict[str, Any]:
    """Return the option of a row, given the length of a prompt with its completion.

    A row holds both completions of a pair.
    """
    return {"data.sequence_length": 2 * length if pairs and type(length) is int else length}


def limits(length: int | None, too_long: str = "drop") -> list[str]:
    """Return the options of `megalite prepare` for a prompt with its completion of up to `length` tokens."""
    words = ["--max_length", str(length)] if length else []
    return words + (["--too_long", too_long] if words and too_long != "drop" else [])


def precomputed(model: str) -> KeyRule:
    """Return the row of log-probabilities of the reference that are computed before training.

    Args:
        model: the key of the model from which training starts.
    """

    def judge(value: Any, source: ImportedFile) -> Verdict:
        if word(value) != "TRUE":
            return harmless("the reference runs before each step")
        command = f"megalite score hf:{source.get(model, 'DIR')} --data PREFIX --output DIR"
        return left(f"run `{command}`, and set preference.reference to scores:DIR")

    return KeyRule(judge, "preference.reference")


def _dropout(value: Any, source: ImportedFile) -> Verdict:
    if word(value) != "TRUE":
        return harmless("dropout is that of config.json and of lora.dropout")
    return honoured({f"model.{name}_dropout": 0.0 for name in ("embedding", "attention", "residual")})


DROPOUT = KeyRule(_dropout, "model.residual_dropout")
NOT_TOGETHER = "prompts and completions are limited together, by --max_length of `megalite prepare`"
REFERENCES: Table = {
    "sync_ref_model": missing("the reference does not change during a run"),
    **each("", "ref_model_mixup_alpha ref_model_sync_steps", never("only used with sync_ref_model")),
    "force_use_ref_model": missing(
        "it names a second model as the reference beside adapters: set preference.reference to hf:DIR"
    ),
    "ref_model_init_kwargs.*": never("preference.reference reads its files and computes in train.precision"),
    "reference_free": missing("use train.objective: cpo with preference.nll_weight: 0"),
    "precompute_ref_batch_size": never("`megalite score` has its own batch size"),
    "ld_alpha": missing("weights of the tokens after the shorter completion's length are not supported"),
    "use_weighting": missing("weights of pairs by the probabilities of their tokens are not supported"),
    "f_divergence_type": only(
        "REVERSE_KL FDIVERGENCETYPE.REVERSE_KL",
        "preference.loss is of log-ratios, the divergence reverse_kl",
    ),
    "f_alpha_divergence_coef": never("only used with f_divergence_type: alpha_divergence"),
    "discopop_tau": only("0.05", "preference.loss: discopop has 0.05, the value of its authors"),
    "truncation_mode": never("included in the `megalite prepare` command"),
    **each("", "max_prompt_length max_completion_length max_prompt_len", missing(NOT_TOGETHER)),
}
"""Keys of TRL's DPO and KTO, which other projects hand on."""
