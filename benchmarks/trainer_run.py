"""One measured run of megalite's trainer: `python -m benchmarks.trainer_run SPEC.json`.

Several ranks are started by torchrun. On a CPU the same ranks and threads then measure the time of the step's
matmuls alone: each rank computes the matmuls of its forward and backward for the same number of microbatches,
without communication, norms, softmax, loss or optimizer. With `profile` in the specification the kernels of a
step are listed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks import breakdown_run, profiled
from benchmarks.measure import Memory, device_memory, finish, matmul_peak, read_spec, timed
from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.launch.matmul_library import MatmulShape
from megalite.launch.process import choose_device, configure_process, start_process_group
from megalite.mesh.mesh import Mesh
from megalite.training import matmul_choice
from megalite.training.trainer import Trainer


def main() -> None:
    spec = read_spec()
    memory = Memory()
    config = from_dict(spec["config"])
    on = spec.get("device", "cpu")
    device = choose_device() if on == "cuda" else torch.device("cpu")
    torch.set_num_threads(spec["threads"])
    configure_process(device)
    start_process_group(device, config.run.timeout)
    mesh = build.make_mesh(config)
    if spec.get("matmul") is None:
        matmul_choice.choose(config, mesh, device)
    else:
        torch.set_float32_matmul_precision(spec["matmul"])
    trainer = Trainer(config, mesh, device)
    gc.collect()  # as the training loop does
    gc.freeze()
    gc.disable()
    seconds = timed(trainer.step, spec["warmup_steps"], spec["steps"])
    peak_memory, on_device = memory.peak_above(), device_memory(on)
    matmul_seconds = (
        timed(step_matmuls(config, trainer.mesh), 1, spec["product_steps"]) if spec["product_steps"] else []
    )
    parts = {}
    if spec.get("breakdown"):
        parts = breakdown_run.measure(trainer, median(seconds), median(matmul_seconds))
    profile = profiled.look(trainer.step, on) if spec.get("profile") else None
    trainer.close()
    result = {
        "seconds": seconds,
        "product_seconds": matmul_seconds,
        "parts": parts,
        "peak_rss_above_import": peak_memory,
        **on_device,
        "profile": profile,
        "matmul": torch.get_float32_matmul_precision(),
        "peak_flops": matmul_peak(spec["peak_size"], build.DTYPES[config.train.precision], device=on),
    }
    finish(spec, result if trainer.mesh.rank == 0 else None)


def step_matmuls(config: Config, mesh: Mesh) -> Callable[[], None]:
    """Return a function that computes this rank's matmuls of one step, between barriers of all ranks."""
    dtype = build.DTYPES[config.train.precision]
    shapes = matmul_choice.step_matmuls(config, mesh)
    prepared = [(shape.times, random_factors(shape, dtype)) for shape in shapes]

    def step() -> None:
        _barrier(mesh)
        for times, (first, second) in prepared:
            for _ in range(times):
                torch.matmul(first, second)
        _barrier(mesh)

    return step


def random_factors(shape: MatmulShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two matrices with random elements for a matmul."""
    leading = [shape.batch] if shape.batch else []

    def factor(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        sizes = (columns, rows) if transposed else (rows, columns)
        matrix = torch.randn(*leading, *sizes)
        return (matrix.mT if transposed else matrix).to(dtype)  # `to` keeps the strides

    first, second = shape.transposed
    return factor(shape.rows, shape.inner, first), factor(shape.inner, shape.columns, second)


def _barrier(mesh: Mesh) -> None:
    if mesh.world.size > 1:
        torch.distributed.barrier()


def describe(spec: dict[str, Any]) -> str:
    """Return a short description of the run for progress lines."""
    parallel, train = spec["config"]["parallel"], spec["config"]["train"]
    layout = (
        " ".join(f"{axis}{parallel[axis]}" for axis in ("tp", "pp", "dp") if parallel[axis] > 1)
        or "one process"
    )
    return f"megalite {train['precision']}{' compiled' if train['compile'] else ''}, {layout}"


if __name__ == "__main__":
    main()
