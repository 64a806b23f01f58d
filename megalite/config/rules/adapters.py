"""Rules between the model and its adapters."""

from functools import partial
from pathlib import Path

from megalite.config.rule import Rule
from megalite.config.rules.context import RuleContext
from megalite.config.sections.lora import (
    EXPERTS,
    PROJECTIONS,
    entries,
    expert_target,
    first_entry,
)

_ALONE = "Remove it, or leave lora.targets out: then all projections of the model have adapters."


def _attention_has(c: RuleContext) -> tuple[str, ...]:
    """The projections of a model with this kind of attention, feed-forward included."""
    if c.model.kv_lora_rank is None:
        others = {"q_a", "q_b", "kv_a", "kv_b"} | (set() if c.model.attention_gate else {"attention_gate"})
        return tuple(role for role in PROJECTIONS if role not in others)
    queries = ("q",) if c.model.q_lora_rank is None else ("q_a", "q_b")
    others = {"q", "k", "v", "q_a", "q_b", "kv_a", "kv_b", "attention_gate"}
    return (*queries, "kv_a", "kv_b", *(role for role in PROJECTIONS if role not in others))


def _adapted(option: str) -> Rule:
    find = partial(
        first_entry,
        option,
        lambda c, name: not c.lora.adapts(name) or name == "gate" and not c.model.gated_mlp,
    )
    return Rule(
        f"lora.{option} are of targets",
        f"lora.{option}",
        lambda c: c.lora.rank and find(c),
        message=lambda c: f"names {find(c)}, which has no adapter",
        legal="Remove the entry, or add it to lora.targets.",
    )


def _of_no_layer(c: RuleContext) -> bool:
    """Whether lora.targets names matrices of dense feed-forwards alone, and there are none: nothing would be
    trained."""
    others = {"attention", "latent_attention", "indexed_attention", "mixture"}
    dense = c.model.shared_expert_intermediate_size or any(
        set(c.model.block_names(layer)) - others for layer in range(c.model.num_hidden_layers)
    )
    targets = set(entries("targets", c))
    return bool(
        c.lora.rank
        and targets
        and targets <= {"gate", "up", "down"}
        and not dense
        and not c.lora.modules_to_save
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "a quantized base and fp8",
        "lora.base",
        lambda c: c.lora.base != "none" and c.train.fp8 != "none",
        message="is incompatible with {train.fp8}: a matrix has codes of one kind",
        legal="Set it or train.fp8 to none.",
    ),
    Rule(
        "adapters and modules of multi-token prediction",
        "model.mtp_layers",
        lambda c: c.model.mtp_layers and c.lora.rank,
        message="is incompatible with {lora.rank}: PEFT's models do not have these modules, so an adapter "
        "with "
        "them could not be exported",
        legal="Set it to 0 to exclude them.",
    ),
    Rule(
        "lora.targets are there",
        "lora.targets",
        lambda c: "gate" in entries("targets", c) and not c.model.gated_mlp,
        message="names gate, but {model.gated_mlp}",
        legal=_ALONE,
    ),
    Rule(
        "lora.targets are of this attention",
        "lora.targets",
        partial(
            first_entry, "targets", lambda c, name: name in PROJECTIONS and name not in _attention_has(c)
        ),
        message=lambda c: (
            f"names {first_entry('targets', lambda c, name: name not in _attention_has(c), c)}, "
            "which this model does not have"
        ),
        legal=_ALONE,
    ),
    Rule(
        "adapters of experts need experts",
        "lora.targets",
        lambda c: not c.model.num_experts and expert_target(c),
        message=lambda c: f"names {expert_target(c)}, but the model has no experts",
        legal=_ALONE,
    ),
    Rule(
        "adapters are of some layer",
        "lora.targets",
        _of_no_layer,
        message="names matrices of dense feed-forward blocks, but every layer of this model is a mixture of "
        "experts, so nothing would be trained",
        legal=f"Name {' and '.join(EXPERTS)}, or projections of attention.",
    ),
    Rule(
        "adapters leave indexers as they are",
        "model.index_loss_coef",
        lambda c: c.model.index_loss_coef and c.lora.rank,
        message="has no effect with {lora.rank}: indexers are frozen with the model",
        legal="Set it to 0.",
    ),
    _adapted("ranks"),
    _adapted("alphas"),
    Rule(
        "a tied head is saved with the embedding",
        "lora.modules_to_save",
        lambda c: (
            c.model.tied_head
            and "head" in entries("modules_to_save", c)
            and "embedding" not in entries("modules_to_save", c)
        ),
        message="names head, but {model.tie_word_embeddings}: the head is the embedding",
        legal="Name embedding, which trains both.",
    ),
    Rule(
        "lora.init_from is an adapter",
        "lora.init_from",
        lambda c: (
            c.lora.init_from
            and not (c.model.initial_weights and Path(c.lora.init_from, "adapter_config.json").is_file())
        ),
        message="is not a PEFT adapter (a directory with adapter_config.json) for {model.init_from}",
        legal="Set both options, with model.init_from set to the base model of the adapter.",
    ),
)
