"""The choice of the library for fp32 matmuls on a CPU, once per run: `train.fp32_matmul`.

At the first start every rank measures the matmuls of its own step, all at once as in training, and the
library with the smaller sum over the ranks is chosen, so all ranks choose alike. fp32_matmul.json in the
run's directory records the choice, and later starts keep it: MKL and oneDNN add in different orders, and a
resumed run must continue with the same bits. A run that continues another run's checkpoint takes that run's
choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megalite.assembly.plan import specs_of
from megalite.checkpoint import CheckpointError, find
from megalite.checkpoint.agreement import on_rank_0
from megalite.config import migrations
from megalite.config.dims import part_length
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.launch import matmul_library
from megalite.launch.matmul_library import NAMES, MatmulShape
from megalite.mesh.layout import Layout
from megalite.mesh.mesh import Mesh
from megalite.model.parameters import head_unit
from megalite.parallel.collectives import all_reduce

FILE = "fp32_matmul.json"
# how much faster than oneDNN MKL must be: runs of one configuration should not differ because two libraries
# are about equal
MARGIN = 1.1


@dataclass(frozen=True)
class MatmulChoice:
    """The library, and why: `option` is `train.fp32_matmul`, `seconds` of one step's products by library,
    summed over the ranks."""

    path: matmul_library.Path
    reason: str
    option: str
    seconds: dict[matmul_library.Path, float]


def choose(config: Config, mesh: Mesh, device: torch.device) -> list[str]:
    """Select the library for this process. Returns lines for the user. Collective.

    Raises:
        ConfigError: on every rank, if the option asks for fp32 products of oneDNN where it rounds to bf16.
    """
    if device.type != "cpu" or config.train.precision != "fp32":
        return []
    option = config.train.fp32_matmul
    rounded = all_reduce(torch.tensor(float(matmul_library.rounds())), mesh.world).wait().item() > 0
    if option == "onednn" and rounded:
        raise ConfigError(
            "train.fp32_matmul = onednn: on this processor oneDNN rounds the factors of fp32 products to "
            "bf16. Set mkl, or set bf16 to "
            "allow it."
        )
    allowed, recorded = matmul_library.candidates(option, rounded), on_rank_0(mesh, lambda: _recorded(config))
    if recorded is not None and recorded["option"] == option and recorded["path"] in allowed:
        choice = MatmulChoice(recorded["path"], "as when the run began", option, {})
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
    return [f"fp32 products by {NAMES[choice.path]}: {choice.reason}"]


def _measured(config: Config, mesh: Mesh, allowed: tuple[matmul_library.Path, ...]) -> MatmulChoice:
    seconds = matmul_library.measure(step_products(config, mesh), allowed)
    summed = (
        all_reduce(torch.tensor([seconds[path] for path in allowed], dtype=torch.float64), mesh.world)
        .wait()
        .tolist()
    )
    total = dict(zip(allowed, summed, strict=True))
    preferred, other = allowed
    path = other if MARGIN * total[other] < total[preferred] else preferred
    rest = preferred if path == other else other
    reason = f"{NAMES[rest]} takes {total[rest] / total[path]:.2f} times its time for this model's products"
    return MatmulChoice(path, reason, config.train.fp32_matmul, total)


def step_products(config: Config, mesh: Mesh) -> list[MatmulShape]:
    """This rank's matrix products of one step: those of its linear layers and of attention, forward and
    backward."""
    train, length, layout = config.train, part_length(config), Layout.of(config)
    keys = length * layout.cp  # of whole rows; ulysses has all queries of fewer heads, which is as much
    microbatches, rows = layout.microbatches, train.micro_batch_size * length
    shapes = linear_shapes(config, mesh)
    linear = [matmul for shape in shapes for matmul in _linear(rows, shape, microbatches)]
    units, last = {spec.unit for spec in specs_of(config, mesh.pp.rank)}, head_unit(config.model)
    layers = len(units - {0, last}) + (config.model.mtp_layers if last in units else 0)
    heads, width = (
        train.micro_batch_size * config.model.num_attention_heads // mesh.tp.size,
        config.model.head_size,
    )
    # query · key and the gradient of the probabilities; then those that multiply by the scores
    count = 2 * layers * microbatches
    attention = [
        MatmulShape(length, width, keys, (False, True), heads, count),
        MatmulShape(length, keys, width, (False, False), heads, count),
        MatmulShape(keys, length, width, (True, False), heads, count),
    ]
    counts: dict[MatmulShape, int] = {}
    for matmul in [*linear, *(attention if count else [])]:
        alike = matmul._replace(times=1)
        counts[alike] = counts.get(alike, 0) + matmul.times
    return [product._replace(times=count) for product, count in counts.items()]


def _linear(rows: int, shape: tuple[int, ...], count: int) -> Iterator[MatmulShape]:
    """The output, the input gradient and the weight gradient of a weight [out, in]."""
    out, inner = shape
    yield MatmulShape(rows, inner, out, (False, True), times=count)
    yield MatmulShape(rows, out, inner, times=count)
    yield MatmulShape(out, rows, inner, (True, False), times=count)


def linear_shapes(config: Config, mesh: Mesh) -> list[tuple[int, ...]]:
    """[out, in] of every weight that this rank multiplies with: all matrices except lookup tables."""
    specs = specs_of(config, mesh.pp.rank)
    tied = config.model.tie_word_embeddings  # an embedding that is also the head counts
    multiplied = [
        spec
        for spec in specs
        if spec.both_ends and tied or spec.unit > 0 and (tied or spec.segments[0].role != "embedding")
    ]
    shapes = [spec.local_shape(mesh.coordinates) for spec in multiplied]
    return [shape for shape in shapes if len(shape) == 2]


def _recorded(config: Config) -> dict[str, Any] | None:
    """The recorded choice of the run, or of the run whose checkpoint it starts from, by this or an earlier
    version."""
    directories = [config.run.directory]
    if (load := config.checkpoint.load) not in ("auto", "none"):
        with suppress(CheckpointError):  # the trainer will say so
            directories.append(find(Path(load)).resolve().parents[1])
    for directory, name in product(directories, (FILE, migrations.FILES[FILE])):
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
    with suppress(OSError):  # a full disk costs no run; a later start measures again
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
