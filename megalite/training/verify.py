"""Comparison of a configuration on a layout with the same configuration on a single process.

Both runs are separate process trees, in which `run_ranks` starts this module on each rank. A run writes the
loss, the gradient norm and the full weights of every step, and the rectangles that each rank stores. The
comparison reports the first step, tensor and rank that differ.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.config.errors import ConfigError
from megalite.config.extensions import load_extensions
from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config
from megalite.config.sections.parallel import ParallelConfig
from megalite.launch import local_ranks as ranks
from megalite.launch.process import choose_device, configure_process, shutdown, start_process_group
from megalite.system.progress import Report, silent
from megalite.training.trainer import Trainer


@dataclass(frozen=True)
class FirstDifference:
    """First difference between two runs.

    Attributes:
        tensor: loss, grad_norm or the name of a weight.
        rank: the rank that stores the element with the largest difference; None for scalars.
    """

    step: int
    tensor: str
    rank: int | None
    error: float
    tolerance: float

    def __str__(self) -> str:
        where = f" on rank {self.rank}" if self.rank is not None else ""
        return (
            f"step {self.step}: {self.tensor}{where} differs by {self.error:.3g} (tolerance "
            f"{self.tolerance:.3g})"
        )


def single_process(config: Config) -> Config:
    """Return the configuration for one process, with the same model, data and global batch, without CUDA
    graphs."""
    alone = from_dict(to_dict(config))
    alone.parallel = ParallelConfig(dp=1, zero=0)
    alone.train = replace(
        alone.train,
        graphs=False,
        micro_batch_size=gcd(alone.train.global_batch_size, *(alone.train.rampup_batch_size or [])[:2]),
    )
    return alone


def record(config: Config, steps: int, directory: Path) -> None:
    """Train for `steps` steps and write the results to `directory`. Called by every rank."""
    from safetensors.torch import save_file

    device = choose_device()
    configure_process(device, config.run.deterministic)
    start_process_group(device, config.run.timeout)
    trainer = Trainer(config, build.make_mesh(config), device)
    scalars = []
    for _ in range(steps):
        result = trainer.step()
        tensors = global_tensors(trainer)
        if trainer.mesh.rank == 0:
            scalars.append({"loss": result.loss, "grad_norm": result.grad_norm})
            save_file(tensors, directory / f"step_{result.step}.safetensors")
    trainer.close()
    placement = _placement(trainer)
    if trainer.mesh.rank == 0:
        (directory / "scalars.json").write_text(json.dumps(scalars), encoding="utf-8")
        (directory / "placement.json").write_text(json.dumps(placement), encoding="utf-8")


def global_tensors(trainer: Trainer, kinds: tuple[str, ...] = ("weight",)) -> dict[str, Tensor]:
    """Return full tensors by name on every rank. Collective.

    Only suitable for small models, because each rank holds all of them in memory.
    """
    import torch.distributed as dist

    # Arrays of bytes are pickled ten times faster than tensors. NumPy does not support bf16.
    own = [
        (part.name, part.global_shape, part.offsets, *_to_bytes(part.tensor))
        for part in trainer.optimizer.state.to_save(kinds)
    ]
    gathered = [own]
    if trainer.mesh.world.size > 1:
        gathered = [own] * trainer.mesh.world.size
        dist.all_gather_object(gathered, own)
    tensors: dict[str, Tensor] = {}
    for name, shape, offsets, dtype, sizes, content in (part for parts in gathered for part in parts):
        if name not in tensors:
            missing = float("nan") if dtype.is_floating_point else 0  # codes of moments
            tensors[name] = torch.full(shape, missing, dtype=dtype)
        rectangle = tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
        tensors[name][rectangle] = torch.from_numpy(content).view(dtype).view(sizes)
    return tensors


def _to_bytes(tensor: Tensor) -> tuple[torch.dtype, torch.Size, Any]:
    return tensor.dtype, tensor.shape, tensor.cpu().reshape(-1).view(torch.uint8).numpy()


def _placement(trainer: Trainer) -> list[list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """Return the rectangles of weights that each rank stores: (name, offsets, sizes). Collective."""
    own = [
        (part.name, part.offsets, tuple(part.tensor.shape))
        for part in trainer.optimizer.state.to_save(("weight",))
    ]
    if trainer.mesh.world.size == 1:
        return [own]
    import torch.distributed as dist

    everyone: list[Any] = [None] * trainer.mesh.world.size
    dist.all_gather_object(everyone, own)
    return everyone


def run_ranks(
    config: Config,
    steps: int,
    directory: Path,
    on_cpu: bool = False,
    progress: Report = silent,
    module: str = "megalite.training.verify",
) -> None:
    """Start the ranks of the configuration, each of which calls `record` of a module.

    Raises:
        ConfigError: the ranks failed. The message contains their output.
    """

    def look() -> None:
        done = sum(1 for _ in directory.glob("step_*"))
        progress(f"training on {count} rank{'s' * (count > 1)}", done, steps, "steps")

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(to_dict(config)), encoding="utf-8")
    count = build.layout(config).world
    with tempfile.TemporaryFile() as output:
        variables = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
        command = ["-m", "megalite.launch.rank", module, str(directory), str(steps)]
        if ranks.run_ranks(count, command, variables=variables, output=output, poll=look):
            output.seek(0)
            raise ConfigError(
                f"the run on {count} ranks failed:\n{output.read().decode(errors='replace')[-4000:]}"
            )


def config_in(directory: Path) -> Config:
    """Return the configuration that `run_ranks` wrote. It may name what its extensions register."""
    config = from_dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    load_extensions(config.run.extensions)
    return config


def compare(directory: Path, reference: Path, relative: float, absolute: float) -> FirstDifference | None:
    """Return the first difference between two recorded runs that exceeds the tolerances.

    Args:
        relative: tolerance for scalars.
        absolute: tolerance for weights.
    """
    from safetensors.torch import load_file

    placement = json.loads((directory / "placement.json").read_text(encoding="utf-8"))
    runs = [
        json.loads((place / "scalars.json").read_text(encoding="utf-8")) for place in (directory, reference)
    ]
    for step, (got, expected) in enumerate(zip(*runs, strict=True), start=1):
        for name in ("loss", "grad_norm"):
            error = abs(got[name] - expected[name]) / max(abs(expected[name]), 1e-30)
            if not error <= relative:
                return FirstDifference(step, name, None, error, relative)
        weights, others = (load_file(place / f"step_{step}.safetensors") for place in (directory, reference))
        for name, value in weights.items():
            delta = (value - others[name]).abs()
            if not delta.max().item() <= absolute:
                return FirstDifference(
                    step,
                    name.removeprefix("weight/"),
                    _rank_of(name, delta, placement),
                    delta.max().item(),
                    absolute,
                )
    return None


def _rank_of(name: str, delta: Tensor, placement: list[list[Any]]) -> int | None:
    """Return the rank that stores the element of a tensor with the largest difference."""
    worst = [int(index) for index in torch.unravel_index(delta.argmax(), delta.shape)]
    for rank, rectangles in enumerate(placement):
        for stored, offsets, sizes in rectangles:
            if stored == name and all(
                low <= at < low + size for at, low, size in zip(worst, offsets, sizes, strict=True)
            ):
                return rank
    return None


def main() -> None:
    """Run one rank of a recorded run.

    The command-line arguments are the directory with its config.json, and the number of steps.
    """
    directory = Path(sys.argv[1])
    record(config_in(directory), int(sys.argv[2]), directory)
    shutdown()


if __name__ == "__main__":
    main()
