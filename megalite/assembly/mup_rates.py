"""What maximal update parametrization (`model.mup`) changes in a run, in one line."""

from __future__ import annotations

from collections import Counter

from megalite.config.schema import Config
from megalite.model.parameters import model_specs

LARGEST_EPS = 1e-10


def describe_mup(config: Config) -> list[str]:
    """Return a line with the multipliers and the rates of matrices, and a warning if epsilon is large.

    Elements of gradients become smaller with the width, and epsilon does not. Empty without mup.
    """
    model, eps = config.model, config.optimizer.eps
    if model.mup is None:
        return []
    line = f"mup: {model.width_growth:g} times the width of the base, logits / {model.width_growth:g}"
    if model.depth_growth != 1.0:
        line += f", outputs of blocks / {model.depth_growth:g}"
    rates = "matrices of layers at muon.lr with factors by their growth"
    if config.optimizer.name != "muon":
        segments = [segment for spec in model_specs(model) for segment in spec.segments if not segment.copy]
        grown = Counter(segment.growth[1] for segment in segments if segment.growth != (1.0, 1.0))
        rates = ", ".join(
            f"{count} matrices at optimizer.lr / {growth:g}" for growth, count in sorted(grown.items())
        )
    lines = [f"{line}; {rates}" if rates else line]
    if eps > LARGEST_EPS and model.width_growth > 1.0:
        lines.append(
            f"WARNING: optimizer.eps = {eps:g} limits the steps of wide matrices, whose gradients are "
            "smaller than those of the base. Set it to 1e-12 at all widths."
        )
    return lines
