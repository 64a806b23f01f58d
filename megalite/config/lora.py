"""The options of low-rank adapters."""

from dataclasses import dataclass
from typing import Literal

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down", "q_a", "q_b", "kv_a", "kv_b")
"""The roles of a layer's matrices, which can have adapters. The last four are those of latent attention."""
EXPERTS = ("experts.in", "experts.down")
"""The roles of the matrices of a layer's experts: gate and up of all experts, and down of all."""
SAVED_MODULES = ("embedding", "head", "norms")
"""What lora.modules_to_save may name."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021). With rank > 0 the model's weights are frozen and only the
    adapters are trained."""

    rank: int = 0
    """Rank of the adapters. 0: no adapters, train the model itself."""
    alpha: float = 16.0
    """Scale of the adapters: an adapted weight is W + alpha / rank * B A."""
    scaling: Literal["standard", "rslora"] = "standard"
    """Divisor of alpha: the rank (standard), or its square root (rslora, rank-stabilised)."""
    dropout: float = 0.0
    """Dropout probability on the adapters' input."""
    targets: list[str] | None = None
    """Projections that have adapters, in every layer: q, k, v, o, gate, up, down and of latent attention q_a,
    q_b, kv_a, kv_b, or their names in PEFT (q_proj; query_key_value means all its parts), and experts.in and
    experts.down of a mixture's experts, each with an adapter of its own (PEFT's target_parameters
    experts.gate_up_proj and experts.down_proj). null, all-linear or an empty list: all projections of the
    model but those of experts."""
    ranks: dict[str, int] | None = None
    """Ranks of single projections, {down: 4}. null: all have rank."""
    alphas: dict[str, float] | None = None
    """Alphas of single projections, {down: 8}. null: all have alpha."""
    dora: bool = False
    """Also train the length of every row of the adapted weights (DoRA, Liu et al. 2024)."""
    modules_to_save: list[str] | None = None
    """Modules trained in full next to the adapters: embedding, head and norms; the first two also by their
    names in PEFT. null: none."""
    init_from: str | None = None
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
