"""Low-rank adapters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from megalite.config.option import FRACTION, NOT_NEGATIVE, POSITIVE, SIZE, option
from megalite.config.rule import Rule

if TYPE_CHECKING:
    from megalite.config.rules.context import RuleContext


MIXERS = {
    "delta": ("q", "k", "v", "z", "b", "a", "f_a", "f_b", "g_a", "g_b", "o"),
    "mamba": ("z", "x", "B", "C", "dt", "o"),
    "conv": ("B", "C", "x", "o"),
}
"""The matrices of delta, mamba and convolution blocks; their roles are PREFIX_NAME."""
PROJECTIONS = [
    *("q", "k", "v", "o", "gate", "up", "down", "q_a", "q_b", "kv_a", "kv_b", "attention_gate"),
    *(f"{kind}_{part}" for kind, parts in MIXERS.items() for part in parts),
]
"""The roles of a layer's matrices, which can have adapters. q_a to kv_b are those of latent attention.
`megalite.model.kinds` adds those of kinds that are registered."""
BUILT_IN_PROJECTIONS = tuple(PROJECTIONS)
EXPERTS = ("experts.in", "experts.down")
"""The roles of the matrices of a layer's experts: gate and up of all experts, and down of all."""
SAVED_MODULES = ("embedding", "head", "norms")
"""What lora.modules_to_save may name."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021). With rank > 0 the model's weights are frozen and only the
    adapters are trained."""

    rank: int = option(0, NOT_NEGATIVE)
    """Rank of the adapters. 0: no adapters, train the model itself."""
    alpha: float = option(16.0, POSITIVE)
    """Scale of the adapters: an adapted weight is W + alpha / rank * B A."""
    scaling: Literal["standard", "rslora"] = "standard"
    """Divisor of alpha: the rank (standard), or its square root (rslora, rank-stabilised)."""
    dropout: float = option(0.0, FRACTION)
    """Dropout probability on the adapters' input."""
    targets: list[str] | None = None
    """Projections that have adapters, in every layer: q, k, v, o, gate, up, down, of latent attention q_a,
    q_b, kv_a and kv_b, of gated attention attention_gate, of delta blocks delta_q, delta_k, delta_v, delta_z,
    delta_b, delta_a, delta_o, of mamba blocks mamba_z, mamba_x, mamba_B, mamba_C, mamba_dt, mamba_o, of
    convolution blocks conv_B, conv_C, conv_x, conv_o, or their names in PEFT (q_proj; query_key_value means
    all its parts), and experts.in and experts.down of a mixture's experts, each with an adapter of its own
    (PEFT's target_parameters experts.gate_up_proj and experts.down_proj). null, all-linear or an empty list:
    all projections of the model but those of experts."""
    ranks: dict[str, int] | None = option(None, SIZE)
    """Ranks of single projections, {down: 4}. null: all have rank."""
    alphas: dict[str, float] | None = option(None, POSITIVE)
    """Alphas of single projections, {down: 8}. null: all have alpha."""
    base: Literal["none", "nf4", "fp4", "int8", "mxfp4"] = "none"
    """Form in which the frozen matrices of layers are stored and gathered: nf4 (QLoRA, Dettmers et al. 2023)
    and fp4 have 4 bits and a scale for 64 elements, int8 has a scale for each row, all as bitsandbytes
    quantizes; mxfp4 has 4 bits and a power of two for 32 elements. Embedding, head, norms and routers keep
    train.precision. none: all do."""
    double_quant: bool = False
    """Also quantize the scales of nf4 or fp4, to 8 bits."""
    start: Literal["default", "loftq"] = "default"
    """Initial A and B: A random and B zero (default), or the best approximation of what the quantization of
    lora.base has lost (loftq; Li et al. 2023, one iteration)."""
    dora: bool = False
    """Also train the length of every row of the adapted weights (DoRA, Liu et al. 2024)."""
    modules_to_save: list[str] | None = None
    """Modules trained in full next to the adapters: embedding, head and norms; the first two also by their
    names in PEFT. null: none."""
    init_from: str | None = option(None, path=True)
    """Directory of a PEFT adapter that gives the initial A and B at step 0, on top of model.init_from. null:
    A is random and B is zero."""

    def adapts(self, role: str) -> bool:
        """Whether projections of this role have adapters."""
        named = role in (self.targets or ())
        return self.rank > 0 and (
            named and role in EXPERTS or role in PROJECTIONS and (named or not self.targets)
        )

    def rank_of(self, role: str) -> int:
        return (self.ranks or {}).get(role, self.rank)

    def scale_of(self, role: str) -> float:
        """The factor on B A."""
        rank = self.rank_of(role)
        return (self.alphas or {}).get(role, self.alpha) / (rank if self.scaling == "standard" else rank**0.5)


def _without_rank(c: "RuleContext") -> bool:
    """Whether there are no adapters, and yet an option that is about them."""
    plain = LoraConfig()
    names = ("dropout", "targets", "init_from", "ranks", "alphas", "dora", "modules_to_save", "scaling")
    return not c.lora.rank and any(
        (getattr(c.lora, name) or None) != (getattr(plain, name) or None)
        for name in (*names, "base", "double_quant", "start")
    )


def entries(option: str, c: "RuleContext") -> list[str]:
    return list(getattr(c.lora, option) or ())


def first_entry(option: str, wrong: Callable[["RuleContext", str], bool], c: "RuleContext") -> str:
    """The first name in an option that is wrong, else an empty text."""
    return next((name for name in entries(option, c) if wrong(c, name)), "")


def _adaptable() -> tuple[str, ...]:
    """The roles that can have adapters, with those of registered kinds of blocks."""
    return (*PROJECTIONS, *EXPERTS)


def _unknown(option: str, known: Callable[[], tuple[str, ...]]) -> Rule:
    find = partial(first_entry, option, lambda c, name: name not in known())
    return Rule(
        f"lora.{option} are known",
        f"lora.{option}",
        find,
        message=lambda c: f"names {find(c)}",
        legal=lambda c: f"Legal names: {', '.join(known())}.",
    )


def expert_target(c: "RuleContext") -> str:
    """The first of lora.targets that is a part of experts, else an empty text."""
    return first_entry("targets", lambda c, name: name in EXPERTS, c)


_WITH_EXPERTS = tuple(
    Rule(
        f"lora.{option} and experts",
        f"lora.{option}",
        partial(lambda option, c: getattr(c.lora, option) and expert_target(c), option),
        message=lambda c: f"is not supported for {expert_target(c)} of lora.targets, as in PEFT",
        legal=f"Set it to {off}, or remove {' and '.join(EXPERTS)} from lora.targets.",
    )
    for option, off in (("dropout", "0"), ("dora", "false"))
)


def _has_nothing_lost(c: "RuleContext") -> bool:
    """Whether lora.start: loftq has no quantized base to start at, or another start is given."""
    lora = c.lora
    other = lora.base == "none" or lora.init_from is not None or lora.dora
    return lora.start == "loftq" and other


RULES: tuple[Rule, ...] = (
    Rule(
        "lora has a rank",
        "lora.rank",
        _without_rank,
        message="trains the model itself, but other lora options are set",
        legal="Set it, for example to 16, or remove the other options.",
    ),
    Rule(
        "scales that are quantized",
        "lora.double_quant",
        lambda c: c.lora.double_quant and c.lora.base not in ("nf4", "fp4"),
        message="has no effect with {lora.base}",
        legal="Set lora.base to nf4 or fp4, or remove it.",
    ),
    Rule(
        "adapters that start at what quantization has lost",
        "lora.start",
        _has_nothing_lost,
        message="needs a quantized base whose adapters have no other start, without DoRA",
        legal="Set it to default, or set lora.base, lora.init_from to null, and lora.dora to false.",
    ),
    _unknown("targets", _adaptable),
    _unknown("ranks", _adaptable),
    _unknown("alphas", _adaptable),
    _unknown("modules_to_save", lambda: SAVED_MODULES),
    *_WITH_EXPERTS,
)
