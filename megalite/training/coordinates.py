"""The coordinate check: how far a few steps move activations, at several widths of a model.

Under maximal update parametrization (`model.mup`) the elements of activations, and their changes since the
initialization, are of one size at every width (Yang et al. 2022, appendix D.1); otherwise some of them grow
or vanish by a power of the width. The model is trained at several widths on the same samples, on one process.
Before the first step and after each step the activations of the first microbatch are computed. The exponent
is the slope of the logarithm of the root mean square of the changes over the logarithm of the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.config.load import from_dict, to_dict
from megalite.config.mup import at_width
from megalite.config.schema import Config
from megalite.model.layer import PlacedBlock
from megalite.model.stage import Stage
from megalite.parallel.microbatch import Microbatch
from megalite.system.progress import Report, silent
from megalite.training.trainer import Trainer
from megalite.training.verify import single_process

WIDTHS = (64, 128, 256, 512, 1024)
BOUND = 0.1
"""Largest exponent of the width, in either direction."""
POSITIONS = 64  # of a row, whose scores of attention are compared


@dataclass(frozen=True)
class Coordinate:
    """The changes of one activation.

    Attributes:
        name: the block that computes it and, if it is not its output, what it is.
        rms: for each width the change since the initialization after each step, a root mean square over
            elements and seeds.
    """

    name: str
    rms: dict[int, list[float]] = field(default_factory=dict)

    def exponent(self, step: int) -> float:
        """Return the exponent of the width after a step (1-based); 0 if nothing changes."""
        points = [(math.log(width), values[step - 1]) for width, values in self.rms.items()]
        if not all(value > 0 and math.isfinite(value) for _, value in points):
            return 0.0 if all(value == 0 for _, value in points) else math.inf
        x, y = [x for x, _ in points], [math.log(value) for _, value in points]
        middle = sum(x) / len(x)
        return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)

    @property
    def steps(self) -> int:
        return len(next(iter(self.rms.values())))

    @property
    def kept(self) -> bool:
        """Whether the size does not depend on the width, after the last step.

        In the first steps a part of the changes of logits is that of the initial head, which vanishes with
        the width.
        """
        return abs(self.exponent(self.steps)) <= BOUND

    def as_json(self) -> dict[str, Any]:
        rms = {width: [_finite(value) for value in values] for width, values in self.rms.items()}
        return {"name": self.name, "rms": rms, "exponent": _finite(self.exponent(self.steps))}


def _finite(value: float) -> float | None:
    """Return the value; None, which JSON has, if it is not finite."""
    return value if math.isfinite(value) else None


def check_coordinates(
    config: Config, widths: Sequence[int], steps: int, seeds: int, progress: Report = silent
) -> list[Coordinate]:
    """Train at each width, and return the changes of all activations in the order of the forward.

    Args:
        config: the run; its model is trained at the widths, with the blocks and the depth that it has.
        seeds: number of initializations, over whose squares a change is averaged.
    """
    squares: dict[str, dict[int, list[list[float]]]] = {}
    for number, (width, seed) in enumerate((width, seed) for width in widths for seed in range(seeds)):
        progress(f"training at width {width}", number, len(widths) * seeds, "models")
        for name, values in _changes(_at(config, width, seed, steps), steps).items():
            squares.setdefault(name, {}).setdefault(width, []).append(values)
    return [
        Coordinate(
            name,
            {
                width: [math.sqrt(sum(step) / len(step)) for step in zip(*by_seed, strict=True)]
                for width, by_seed in by_width.items()
            },
        )
        for name, by_width in squares.items()
    ]


def _at(config: Config, width: int, seed: int, steps: int) -> Config:
    """Return the configuration of one process at a width, at a constant learning rate."""
    alone = single_process(from_dict(to_dict(config)))
    alone.model = replace(at_width(config.model, width), preset=None, from_hf=None, init_from=None)
    alone.run = replace(alone.run, seed=config.run.seed + seed)
    alone.train = replace(alone.train, steps=steps)
    alone.optimizer = replace(alone.optimizer, warmup_steps=0, decay="constant")
    alone.checkpoint = replace(alone.checkpoint, load="none")
    return alone


def _changes(config: Config, steps: int) -> dict[str, list[float]]:
    """Return the mean square of the change of each activation after each step."""
    trainer = Trainer(config, build.make_mesh(config))
    try:
        (stage,) = trainer.parts.stages.values()
        probe = trainer.loader.step(0)[0]
        start = activations(stage, probe)
        changes: dict[str, list[float]] = {name: [] for name in start}
        for _ in range(steps):
            trainer.step()
            for name, value in activations(stage, probe).items():
                changes[name].append((value - start[name]).square().mean().item())
        return changes
    finally:
        trainer.close()


@torch.no_grad()
def activations(stage: Stage, microbatch: Microbatch) -> dict[str, Tensor]:
    """Return activations of a stage that is a whole model, in fp64, in the order of the forward.

    They are the output of each block, the scores of its attention (of up to POSITIONS positions), the logits
    of its router, and the logits of the model without padding.
    """
    recorded: dict[str, Tensor] = {}
    undo: list[Callable[[], None]] = []
    for placed in (module for module in stage.layers.modules() if isinstance(module, PlacedBlock)):
        undo += _watch(placed, recorded)
    state = stage.forward_state(microbatch, step=0, training=False)
    try:
        logits = stage.logits(microbatch.tokens, state)
    finally:
        for each in undo:
            each()
    vocabulary = stage.model_config.vocabulary
    return recorded | {"logits": logits[..., :vocabulary].double()}


def _watch(placed: PlacedBlock, recorded: dict[str, Tensor]) -> list[Callable[[], None]]:
    """Record what a block computes from now on. Returns functions that end it."""
    block, name = placed.block, placed.spec.name

    def output(module: Any, arguments: Any, result: Tensor) -> None:
        recorded[name] = result.double()

    hooks: list[Callable[[], None]] = [block.register_forward_hook(output).remove]
    caller, attend = block.call, getattr(block, "attend", None)

    def calling(operation: Any, *arguments: Any) -> Any:
        if operation is attend and all(x.dim() == 4 for x in arguments[:2]):
            recorded[f"{name}, scores"] = _scores(*arguments[:2]) * arguments[3]["scale"]
        return caller(operation, *arguments)

    if attend is not None:
        block.call = calling
        hooks.append(lambda: setattr(block, "call", caller))
    if (router := getattr(block, "router", None)) is not None:
        compute = router.compute

        def computing(*arguments: Any) -> Tensor:
            recorded[f"{name}, router"] = (result := compute(*arguments)).double()
            return result

        router.compute = computing
        hooks.append(lambda: delattr(router, "compute"))
    return hooks


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Return q · k of all pairs of positions, [batch, heads, query, key], of [seq, batch, heads, width]."""
    q, k = (x[:POSITIONS].double() for x in (q, k))
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("qbhd,kbhd->bhqk", q, k)


def draw(coordinates: Sequence[Coordinate], file: Path) -> None:
    """Draw the changes against the width after the last step, a line for each activation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for each in coordinates:
        values = [steps[-1] for steps in each.rms.values()]
        label = f"{each.name}: {each.exponent(each.steps):+.2f}"
        axes.plot(list(each.rms), values, marker="o", label=label, linestyle="-" if each.kept else "--")
    axes.set(xscale="log", yscale="log", xlabel="width", ylabel="change since initialization, rms")
    axes.set_xticks(list(coordinates[0].rms), [str(width) for width in coordinates[0].rms], minor=False)
    axes.minorticks_off()
    figure.legend(loc="outside right upper", fontsize="small", title="exponent of the width")
    figure.savefig(file)
