"""Learning from the distributions of a teacher (`train.objective` = distillation)."""

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from megalite.config.option import NOT_NEGATIVE, POSITIVE, Bounds, option
from megalite.config.rule import Rule
from megalite.config.sections.preference import SCORES

if TYPE_CHECKING:
    from megalite.config.schema import Config

INSIDE = Bounds(lambda n: 0 < n < 1, "is out of range", "above 0 and below 1")
DISTILLATION = "distillation"


@dataclass
class DistillationConfig:
    """Options of train.objective = distillation: the loss of a token is the divergence of the model's
    distribution of the next token from that of a teacher."""

    teacher: str | None = option(None, path=True)
    """The teacher: a checkpoint directory, a run's directory for its newest checkpoint, or hf:DIR for a
    Hugging Face directory. It has the vocabulary of the model, is not trained, and computes with this run's
    layout and precision. scores:DIR: the most probable words of a teacher, which megalite score --top_k has
    stored for the rows of this run's data."""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """The divergence of a token, with p of the teacher and q of the model: KL(p||q) (forward), KL(q||p)
    (reverse), or the generalized Jensen-Shannon divergence beta KL(p||m) + (1 - beta) KL(q||m), m = beta p +
    (1 - beta) q (jsd)."""
    beta: float = option(0.5, INSIDE)
    """With divergence: jsd, the share of the teacher in the mixture m."""
    temperature: float = option(1.0, POSITIVE)
    """Divisor of the logits of both models in the divergence. The divergence is not multiplied by its
    square."""
    cross_entropy_weight: float = option(0.0, NOT_NEGATIVE)
    """Factor of the cross-entropy of the next token, without temperature, which is added to the divergence.
    """


def stored_teacher(options: DistillationConfig) -> str | None:
    """The directory of a teacher's words; None: a run has none."""
    name = options.teacher or ""
    return name.removeprefix(SCORES) if name.startswith(SCORES) else None


def distils(c: "Config") -> bool:
    """Whether a run learns from a teacher."""
    return c.train.objective == DISTILLATION


def _unused(name: str) -> Rule:
    default = next(field.default for field in fields(DistillationConfig) if field.name == name)
    return Rule(
        f"distillation.{name} is read",
        f"distillation.{name}",
        lambda c: getattr(c.distillation, name) != default and not distils(c),
        message="has no effect with {train.objective}",
        legal="Remove it, or set train.objective to distillation.",
    )


def _no_stored_list(option: str, legal: str) -> Rule:
    return Rule(
        f"words are stored for {option}",
        option,
        lambda c: (
            distils(c)
            and stored_teacher(c.distillation)
            and isinstance(attrgetter(option)(c), list)
            and len(attrgetter(option)(c)) > 1
        ),
        message="is one text of several files, and {distillation.teacher} has the words of each file apart",
        legal=legal,
    )


RULES: tuple[Rule, ...] = (
    *(_unused(field.name) for field in fields(DistillationConfig)),
    Rule(
        "a teacher is given",
        "distillation.teacher",
        lambda c: distils(c) and c.distillation.teacher is None,
        message="is required by {train.objective}: the loss is the divergence from a teacher",
        legal="Set it to a checkpoint, a run's directory or hf:DIR.",
    ),
    Rule(
        "stored words have a forward divergence",
        "distillation.divergence",
        lambda c: distils(c) and stored_teacher(c.distillation) and c.distillation.divergence != "forward",
        message="is not supported with {distillation.teacher}, which knows the words of the teacher alone",
        legal="Set it to forward.",
    ),
    _no_stored_list("data.train", "Write {PREFIX: weight} for a blend, or prepare one token file."),
    _no_stored_list("data.validation", "Write {NAME: PREFIX} for several sets, or prepare one token file."),
    Rule(
        "the mixture of jsd",
        "distillation.beta",
        lambda c: distils(c) and c.distillation.beta != 0.5 and c.distillation.divergence != "jsd",
        message="has no effect with {distillation.divergence}",
        legal="Remove it, or set distillation.divergence to jsd.",
    ),
)
