"""Numbers of objectives that learn from preferences (`train.objective`)."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from megalite.config.extensions import is_own_objective
from megalite.config.option import NOT_NEGATIVE, POSITIVE, Bounds, option
from megalite.config.rule import Rule

if TYPE_CHECKING:
    from megalite.config.rules.context import RuleContext

BELOW_HALF = Bounds(lambda n: 0 <= n < 0.5, "is out of range", "at least 0 and below 0.5")


@dataclass
class PreferenceConfig:
    """Options of the objectives over preferences: pairs of a chosen and a rejected completion, or single
    completions that are good or bad (`train.objective`)."""

    reference: str | None = option(None, path=True)
    """Of objectives with a reference model, which model that is. null: the one from which training starts. A
    checkpoint directory, a run's directory for its newest checkpoint, or hf:DIR for a Hugging Face directory:
    that model, with weights of its own. scores:DIR: that of the scores in a directory that megalite score has
    made, without a forward pass before each step."""
    allow_reference_change: bool = False
    """Accept scores of another model than the one from which training starts."""
    beta: float = option(0.1, POSITIVE)
    """Factor of the scores. With a reference model, the larger it is, the closer the model stays to it; with
    orpo it is the weight of the preference."""
    loss: Literal[
        "sigmoid",
        "hinge",
        "robust",
        "sigmoid_norm",
        "exo_pair",
        "discopop",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
    ] = "sigmoid"
    """Of dpo and cpo, the loss of a pair: logistic (sigmoid), max(0, 1 - x) (hinge), or logistic with a
    correction for wrong labels (robust). The others are of dpo only: logistic of means over tokens
    (sigmoid_norm), and those that have the names of papers."""
    label_smoothing: float = option(0.0, BELOW_HALF)
    """Of dpo, cpo and simpo with loss: sigmoid, robust, sigmoid_norm or exo_pair, the probability that a
    label is wrong. exo_pair requires it."""
    gamma: float = option(0.5, NOT_NEGATIVE)
    """Of simpo, the margin by which the score of the chosen completion should be higher."""
    nll_weight: float | None = option(None, NOT_NEGATIVE)
    """With pairs, factor of the negative log-likelihood of chosen completions (with orpo also of their
    prompts), a mean over tokens that is added to the loss. null: 1 for cpo and orpo, 0 for others."""
    center_rewards: float = option(0.0, NOT_NEGATIVE)
    """Of reward, factor of the square of the sum of a pair's rewards, which keeps their mean at 0."""
    desirable_weight: float = option(1.0, POSITIVE)
    """Of kto, weight of the losses of good completions."""
    undesirable_weight: float = option(1.0, POSITIVE)
    """Of kto, weight of the losses of bad completions."""


SCORES = "scores:"
WITH_BETA = ("dpo", "ipo", "simpo", "cpo", "orpo", "kto")
WITH_REFERENCE = ("dpo", "ipo", "kto")
OF_CPO = ("sigmoid", "hinge", "robust")
SMOOTHED = ("sigmoid", "robust", "sigmoid_norm", "exo_pair")
"""Values of preference.loss that read label_smoothing."""
USED_BY = {
    "reference": WITH_REFERENCE,
    "allow_reference_change": WITH_REFERENCE,
    "beta": WITH_BETA,
    "loss": ("dpo", "cpo"),
    "label_smoothing": ("dpo", "cpo", "simpo"),
    "gamma": ("simpo",),
    "nll_weight": ("dpo", "ipo", "simpo", "cpo", "orpo"),
    "center_rewards": ("reward",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Options that only some of the objectives read. A user's own may read them all."""


def scores_directory(options: PreferenceConfig) -> str | None:
    """The directory of the scores of a reference model; None: a run has none."""
    reference = options.reference or ""
    return reference.removeprefix(SCORES) if reference.startswith(SCORES) else None


def reference_model(options: PreferenceConfig) -> str | None:
    """The reference model by name; None: it is the one from which training starts, or has scores."""
    return None if scores_directory(options) is not None else options.reference


def _changed(c: "RuleContext", name: str) -> bool:
    default = next(field.default for field in fields(PreferenceConfig) if field.name == name)
    return bool(getattr(c.preference, name) != default)


def _unused(name: str) -> Rule:
    readers = USED_BY.get(name)
    names = "an objective over preferences, such as dpo" if readers is None else " or ".join(readers)

    def broken(c: "RuleContext") -> bool:
        others = ("cross_entropy", "distillation")
        read = c.train.objective not in others if readers is None else c.train.objective in readers
        return _changed(c, name) and not read and not is_own_objective(c.train.objective)

    return Rule(
        f"preference.{name} is read",
        f"preference.{name}",
        broken,
        message="has no effect with {train.objective}",
        legal=f"Remove it, or set train.objective to {names}.",
    )


RULES: tuple[Rule, ...] = (
    *(_unused(field.name) for field in fields(PreferenceConfig)),
    Rule(
        "a change of scores",
        "preference.allow_reference_change",
        lambda c: c.preference.allow_reference_change and scores_directory(c.preference) is None,
        message="has no effect with {preference.reference}",
        legal="Remove it, or set preference.reference to scores:DIR.",
    ),
    Rule(
        "smoothing of a logistic loss",
        "preference.label_smoothing",
        lambda c: c.preference.label_smoothing and c.preference.loss not in SMOOTHED,
        message="has no effect with {preference.loss}",
        legal="Set it to 0, or set preference.loss to sigmoid or robust.",
    ),
    Rule(
        "labels that may be wrong",
        "preference.label_smoothing",
        lambda c: not c.preference.label_smoothing and c.preference.loss == "exo_pair",
        message="leaves the loss without a limit with {preference.loss}, whose target it is",
        legal="Set it to a small probability, such as 0.001.",
    ),
    Rule(
        "losses of cpo",
        "preference.loss",
        lambda c: c.train.objective == "cpo" and c.preference.loss not in OF_CPO,
        message="is relative to a reference model, which {train.objective} does not have",
        legal=f"Set it to {', '.join(OF_CPO)}, or set train.objective to dpo.",
    ),
)
