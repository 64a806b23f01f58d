"""One rank of `benchmarks.checkpoint`: `python -m benchmarks.checkpoint_run SPEC.json`, under torchrun.

Each rank holds its shard of the state as rectangles of global matrices. It alternates between saving them as
a run does, synchronously and in the background, and writing the same tensors with torch.save to the same
directory, always with fsync. Timing starts after a barrier of all ranks, and a save ends when the last rank
has finished.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.measure import Memory, finish, read_spec
from megalite import checkpoint
from megalite.checkpoint.saver import Saver
from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.spec import Rectangle

KINDS = ("weight", "exp_avg", "exp_avg_sq")


def main() -> None:
    spec = read_spec()
    torch.set_num_threads(spec["threads"])
    dist.init_process_group("gloo")
    mesh = Mesh(Layout(dp=dist.get_world_size()), background=["saving"])
    directory = Path(spec["directory"])
    own = rectangles(mesh, spec["matrices"], tuple(spec["shape"]))
    warm_up(mesh, directory)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "torch.save": lambda: with_torch(mesh, directory, own),
        "at once": lambda: with_saver(Saver(mesh, CheckpointConfig()), mesh, directory, own),
    }
    background, memory = Saver(mesh, CheckpointConfig(async_save=True)), Memory()
    background.reserve(own)  # as at the start of a run
    reserved = float(memory.peak_above() or 0)
    ways["in the background"] = lambda: with_saver(background, mesh, directory, own)
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(spec["rounds"]):
        for name, way in ways.items():
            memory = Memory()
            dist.barrier()
            figures = way()
            figures["extra_bytes"] = float(memory.peak_above() or 0) + (
                reserved if name == "in the background" else 0.0
            )
            seconds[name].append({key: over_ranks(value) for key, value in figures.items()})
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)
            dist.barrier()
    size = sum(part.tensor.nbytes for part in own) * mesh.world.size
    finish(spec, {"bytes": size, "ways": seconds} if mesh.rank == 0 else None)


def rectangles(mesh: Mesh, matrices: int, shape: tuple[int, ...]) -> list[Rectangle]:
    """Return this rank's rows of every matrix, three times: fp32 weights and two moments.

    They are random, so that file systems cannot compress them.
    """
    rows = shape[0] // mesh.world.size
    generator = torch.Generator().manual_seed(mesh.rank)
    return [
        Rectangle(
            f"{kind}/{number}", shape, (mesh.rank * rows, 0), torch.randn(rows, shape[1], generator=generator)
        )
        for kind in KINDS
        for number in range(matrices)
    ]


def warm_up(mesh: Mesh, directory: Path) -> None:
    """Trigger imports with a small first save."""
    part = Rectangle("w", (mesh.world.size, 8), (mesh.rank, 0), torch.zeros(1, 8))
    checkpoint.save(directory / "warm_up", [part], {}, mesh)
    dist.barrier()
    if mesh.rank == 0:
        shutil.rmtree(directory / "warm_up")


def with_torch(mesh: Mesh, directory: Path, own: list[Rectangle]) -> dict[str, float]:
    started = perf_counter()
    (directory / "checkpoints").mkdir(exist_ok=True)
    with open(directory / "checkpoints" / f"{mesh.rank}.pt", "wb") as file:
        torch.save({part.name: part.tensor for part in own}, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = perf_counter() - started
    return {"held_s": seconds, "durable_s": seconds}


def with_saver(saver: Saver, mesh: Mesh, directory: Path, own: list[Rectangle]) -> dict[str, float]:
    save = saver.begin(directory / "checkpoints" / checkpoint.step_name(1), own, {})
    saver.wait()
    if save.error is not None:
        raise save.error
    return {"held_s": save.held, "durable_s": save.durable}


def over_ranks(value: float) -> float:
    """Return the maximum over ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


if __name__ == "__main__":
    main()
