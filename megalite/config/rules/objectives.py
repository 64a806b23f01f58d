"""Rules between an objective over preferences, its data, its reference model and other losses."""

from collections.abc import Callable
from typing import Any

from megalite.config.extensions import is_own_objective, is_source
from megalite.config.rule import Rule
from megalite.config.rules.context import RuleContext
from megalite.config.sections.data import present_prefixes, text_sources
from megalite.config.sections.distillation import distils
from megalite.config.sections.preference import scores_directory
from megalite.config.streams import is_stream
from megalite.config.token_files import preference
from megalite.objectives.find import objective_class


def _of_sequences(c: RuleContext) -> bool:
    """Whether the objective is about whole sequences. Raises ConfigError if it is unknown."""
    return objective_class(c.train.objective).data != "tokens"


def _starts_as_reference(c: RuleContext) -> bool:
    """Whether the objective has a reference model, which is the one from which training starts."""
    return objective_class(c.train.objective).needs_reference and c.preference.reference is None


def _head(c: RuleContext) -> str:
    """The head that the objective needs."""
    return "reward" if objective_class(c.train.objective).reads == "rewards" else "vocabulary"


def _reads(c: RuleContext) -> str:
    return "rewards" if _head(c) == "reward" else "log-probabilities of tokens"


def _other_data(c: RuleContext) -> str | None:
    """The first token file or data source that is not what the objective needs."""
    needed = objective_class(c.train.objective).data
    named = (*text_sources(c), *present_prefixes(c))
    return next((each for each in named if (preference(each) or "tokens") != needed), None)


def _contents(c: RuleContext) -> str:
    """What the first token file with other data has."""
    kinds = {"pairs": "pairs of completions", "labelled": "completions with a label"}
    return kinds.get(preference(_other_data(c) or "") or "", "no preferences")


def _way_to_data(c: RuleContext) -> str:
    if _of_sequences(c):
        needed, present = objective_class(c.train.objective).data, preference(_other_data(c) or "")
        if is_source(_other_data(c)) or is_stream(_other_data(c)):
            return (
                "Use token files of `megalite prepare --preference`, or set train.objective to cross_entropy."
            )
        if not present:
            return "Prepare it with `megalite prepare --preference`, or set train.objective to cross_entropy."
        option = (
            "the same records with `megalite prepare --preference labelled`"
            if needed == "labelled"
            else "pairs with `megalite prepare --preference`"
        )
        other = "kto" if needed == "pairs" else "dpo or another objective over pairs"
        return f"Prepare {option}, or set train.objective to {other}."
    return "Set train.objective to simpo or another objective over preferences, or train on other data."


def _batches(c: RuleContext) -> list[int]:
    """The smallest and the largest number of rows of a step."""
    ramp = c.train.rampup_batch_size
    return [c.train.global_batch_size] if ramp is None else [ramp[0], c.train.global_batch_size]


def _excludes(option: str, is_set: Callable[[RuleContext], Any], reason: str, legal: str) -> Rule:
    """Return the rule that an option is not supported with an objective over sequences."""
    return Rule(
        f"{option} and objectives over sequences",
        option,
        lambda c: is_set(c) and _of_sequences(c),
        message=f"is not supported with {{train.objective}}: {reason}",
        legal=legal,
    )


def _excludes_teacher(option: str, is_set: Callable[[RuleContext], Any], reason: str, legal: str) -> Rule:
    """Return the rule that an option is not supported with a teacher."""
    return Rule(
        f"{option} and distillation",
        option,
        lambda c: is_set(c) and distils(c),
        message=f"is not supported with {{train.objective}}: {reason}",
        legal=legal,
    )


def _without_cross_entropy(option: str) -> Rule:
    """Return the rule that a term of the cross-entropy needs the cross-entropy."""
    return Rule(
        f"{option} and a divergence alone",
        option,
        lambda c: (
            distils(c) and getattr(c.train, option.split(".")[1]) and not c.distillation.cross_entropy_weight
        ),
        message="has no effect with {distillation.cross_entropy_weight}: it is a part of the cross-entropy",
        legal="Set it to 0, or distillation.cross_entropy_weight to 1.",
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "an objective and its data",
        "train.objective",
        _other_data,
        message=lambda c: f"needs other data than {_other_data(c)}, which has {_contents(c)}",
        legal=_way_to_data,
    ),
    Rule(
        "an objective and its head",
        "model.output_head",
        lambda c: c.model.output_head != _head(c),
        message=lambda c: f"does not fit train.objective = {c.train.objective}, which reads {_reads(c)}",
        legal=lambda c: (
            f"Set it to {_head(c)}"
            + (", or train.objective to reward." if c.model.output_head == "reward" else ".")
        ),
    ),
    Rule(
        "rewards have no likelihoods",
        "preference.nll_weight",
        lambda c: c.preference.nll_weight and is_own_objective(c.train.objective) and _head(c) == "reward",
        message="has no effect with {train.objective}, which reads rewards and no log-probabilities",
        legal="Remove it.",
    ),
    Rule(
        "a reward model has no head of tokens to save",
        "lora.modules_to_save",
        lambda c: "head" in (c.lora.modules_to_save or ()) and c.model.output_head == "reward",
        message="names head, but {model.output_head}, whose head is always trained",
        legal="Remove head.",
    ),
    Rule(
        "a start in fp8",
        "train.fp8",
        lambda c: c.train.fp8 != "none" and not c.lora.rank and _starts_as_reference(c),
        message="is not supported with {train.objective} if all parameters are trained and the reference is "
        "a copy of their start",
        legal="Set preference.reference to the model of model.init_from, or train.fp8 to none.",
    ),
    Rule(
        "scores have no mismatched completions",
        "preference.reference",
        lambda c: scores_directory(c.preference) and objective_class(c.train.objective).needs_baseline,
        message="is not supported with {train.objective}, which also scores prompts with other completions",
        legal="Set it to null or to a model.",
    ),
    Rule(
        "other completions are in other rows",
        "data.packing",
        lambda c: c.data.packing and objective_class(c.train.objective).needs_baseline,
        message="is not supported with {train.objective}, which reads each prompt with another completion",
        legal="Set it to false.",
    ),
    Rule(
        "other completions are in the batch",
        "train.global_batch_size",
        lambda c: min(_batches(c)) < 2 and objective_class(c.train.objective).needs_baseline,
        message="has no other completion for {train.objective}, which reads each prompt with another one",
        legal="Set it to 2 or more, and train.rampup_batch_size to null or a start of 2 or more.",
    ),
    _excludes(
        "model.mtp_layers",
        lambda c: c.model.mtp_layers,
        "modules of multi-token prediction have no loss over sequences",
        "Set it to 0.",
    ),
    _excludes(
        "train.label_smoothing",
        lambda c: c.train.label_smoothing,
        "its scores are log-probabilities",
        "Set it to 0. Wrong labels of preferences are preference.label_smoothing.",
    ),
    _without_cross_entropy("train.label_smoothing"),
    _without_cross_entropy("train.z_loss"),
    _excludes_teacher(
        "model.mtp_layers",
        lambda c: c.model.mtp_layers,
        "modules of multi-token prediction have no teacher",
        "Set it to 0.",
    ),
    _excludes_teacher(
        "train.graphs",
        lambda c: c.train.graphs,
        "the states of the teacher are elsewhere in memory for each microbatch",
        "Set it to false.",
    ),
    _excludes("train.z_loss", lambda c: c.train.z_loss, "its scores are log-probabilities", "Set it to 0."),
    _excludes(
        "logging.loss_by_source",
        lambda c: c.logging.loss_by_source,
        "a preference has no loss of tokens",
        "Set it to false.",
    ),
)
