"""Selection of the library for fp32 matmuls on a CPU, once per run (`train.fp32_matmul`).

At the first start every rank measures the matmuls of its own step, all ranks at the same time as in training.
All ranks select the library with the smaller sum over the ranks. The choice is recorded in fp32_matmul.json
in the directory of the run and kept by later starts, because MKL and oneDNN add in different orders and a
resumed run must be bitwise reproducible. A run that continues the checkpoint of another run uses its choice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.assembly.plan import specs_of
from megalite.checkpoint import CheckpointError, find
from megalite.checkpoint.agreement import on_rank_0
from megalite.config import migrations, run_files
from megalite.config.dims import part_length
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.launch import matmul_library
from megalite.launch.matmul_library import NAMES, MatmulShape
from megalite.mesh.layout import Layout
from megalite.mesh.mesh import Mesh
from megalite.model.cost.records import AttentionCost, Share
from megalite.model.cost.units import Units
from megalite.model.unit_numbers import layers_in
from megalite.parallel.collectives import all_reduce

# how much faster than oneDNN MKL must be: runs of one configuration should not differ because two libraries
# are about equal
MARGIN = 1.1


@dataclass(frozen=True)
class MatmulChoice:
    """The selected library, and the reason.

    Attributes:
        option: the value of `train.fp32_matmul`.
        seconds: time of the matmuls of one step by library, summed over the ranks.
    """

    path: matmul_library.Path
    reason: str
    option: str
    seconds: dict[matmul_library.Path, float]


def choose(config: Config, mesh: Mesh, device: torch.device) -> list[str]:
    """Select the library for this process, and return lines for the user. Collective.

    Raises:
        ConfigError: on every rank, if the option selects fp32 matmuls of oneDNN, but oneDNN rounds them to
            bf16.
    """
    if device.type != "cpu" or config.train.precision != "fp32":
        return []
    option = config.train.fp32_matmul
    rounded = all_reduce(torch.tensor(float(matmul_library.rounds())), mesh.world).wait().item() > 0
    if option == "onednn" and rounded:
        raise ConfigError(
            "train.fp32_matmul=onednn is not supported on this processor, because oneDNN rounds "
            "the factors of fp32 matmuls to bf16. Set train.fp32_matmul=mkl, or set "
            "train.fp32_matmul=bf16 to allow the rounding."
        )
    allowed, recorded = matmul_library.candidates(option, rounded), on_rank_0(mesh, lambda: _recorded(config))
    if recorded is not None and recorded["option"] == option and recorded["path"] in allowed:
        choice = MatmulChoice(recorded["path"], "unchanged since the run started", option, {})
    elif config.run.deterministic or len(allowed) == 1:
        choice = MatmulChoice(
            allowed[0],
            "run.deterministic" if len(allowed) > 1 else f"train.fp32_matmul = {option}",
            option,
            {},
        )
    else:
        choice = _measured(config, mesh, allowed)
    matmul_library.use(choice.path)
    if mesh.rank == 0 and recorded is None:
        _record(config.run.directory, choice)
    return [f"fp32 matmuls use {NAMES[choice.path]}: {choice.reason}"]


def _measured(config: Config, mesh: Mesh, allowed: tuple[matmul_library.Path, ...]) -> MatmulChoice:
    seconds = matmul_library.measure(step_matmuls(config, mesh), allowed)
    summed = (
        all_reduce(torch.tensor([seconds[path] for path in allowed], dtype=torch.float64), mesh.world)
        .wait()
        .tolist()
    )
    total = dict(zip(allowed, summed, strict=True))
    preferred, other = allowed
    path = other if MARGIN * total[other] < total[preferred] else preferred
    rest = preferred if path == other else other
    reason = (
        f"{NAMES[rest]} takes {total[rest] / total[path]:.2f} times as long for the matmuls of this model"
    )
    return MatmulChoice(path, reason, config.train.fp32_matmul, total)


def _attentions(config: Config, mesh: Mesh) -> list[AttentionCost]:
    """Return the attention of each layer on this rank."""
    share = Share.of(config.parallel, config.data.sequence_length, config.train.micro_batch_size)
    units, numbers = Units(config.model, share), {spec.unit for spec in specs_of(config, mesh.pp.rank)}
    layers = [layer for number in sorted(numbers) for layer in layers_in(config.model, number)]
    return [step for layer in layers for step in units.layer(layer).attentions]


def _attention(step: AttentionCost, length: int, microbatches: int) -> list[MatmulShape]:
    """Return the matmuls of attention; ulysses has all queries of fewer heads, which is as much."""
    width, keys, heads = step.key_size, step.sequence, step.batch * step.heads
    # query · key and the gradient of the probabilities; then those that multiply by the scores
    count = 2 * microbatches
    return [
        MatmulShape(length, width, keys, (False, True), heads, count),
        MatmulShape(length, keys, width, (False, False), heads, count),
        MatmulShape(keys, length, width, (True, False), heads, count),
    ]


def step_matmuls(config: Config, mesh: Mesh) -> list[MatmulShape]:
    """Return this rank's matmuls of one step, in linear layers and attention, forward and backward."""
    train, length, layout = config.train, part_length(config), Layout.of(config)
    microbatches, rows = layout.microbatches, train.micro_batch_size * length
    shapes = linear_shapes(config, mesh)
    linear = [matmul for shape in shapes for matmul in _linear(rows, shape, microbatches)]
    attention = [
        matmul for step in _attentions(config, mesh) for matmul in _attention(step, length, microbatches)
    ]
    counts: dict[MatmulShape, int] = {}
    for matmul in [*linear, *attention]:
        alike = matmul._replace(times=1)
        counts[alike] = counts.get(alike, 0) + matmul.times
    return [matmul._replace(times=count) for matmul, count in counts.items()]


def _linear(rows: int, shape: tuple[int, ...], count: int) -> Iterator[MatmulShape]:
    """Yield the matmuls for the output, input gradient and weight gradient of a weight [out, in]."""
    out, inner = shape
    yield MatmulShape(rows, inner, out, (False, True), times=count)
    yield MatmulShape(rows, out, inner, times=count)
    yield MatmulShape(out, rows, inner, (True, False), times=count)


def linear_shapes(config: Config, mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the [out, in] shape of every weight matrix on this rank, excluding embeddings."""
    specs = specs_of(config, mesh.pp.rank)
    tied = config.model.tied_head  # an embedding that is also the head counts
    multiplied = [
        spec
        for spec in specs
        if spec.both_ends and tied or spec.unit > 0 and (tied or spec.segments[0].role != "embedding")
    ]
    shapes = [spec.local_shape(mesh.coordinates) for spec in multiplied]
    return [shape for shape in shapes if len(shape) == 2]


def _recorded(config: Config) -> dict[str, Any] | None:
    """Return the recorded choice of the run, or of the run whose checkpoint it starts from.

    Records of earlier versions are supported.
    """
    directories = [config.run.directory]
    if (load := config.checkpoint.load) not in ("auto", "none"):
        with suppress(CheckpointError):  # reported by the trainer
            directories.append(find(Path(load)).resolve().parents[1])
    names = run_files.FP32_MATMUL, migrations.FILES[run_files.FP32_MATMUL]
    for directory, name in itertools.product(directories, names):
        with suppress(OSError, ValueError):
            record: dict[str, Any] = json.loads((directory / name).read_text(encoding="utf-8"))
            return record if record.keys() >= {"path", "option"} else None
    return None


def _record(directory: Path, choice: MatmulChoice) -> None:
    content = {
        "path": choice.path,
        "option": choice.option,
        "reason": choice.reason,
        "seconds": choice.seconds,
    }
    with suppress(OSError):  # a full disk must not end the run; a later start measures again
        directory.mkdir(parents=True, exist_ok=True)
        (directory / run_files.FP32_MATMUL).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
