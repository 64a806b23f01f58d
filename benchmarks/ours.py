"""One measured run of megalite's trainer: `python -m benchmarks.ours SPEC.json`, under torchrun for more than one rank.

On a CPU it then measures, with the same ranks and threads, the time of the step's matrix products alone: each rank multiplies matrices of
its own shapes, forward and backward, for the same number of microbatches, without communication, norms, softmax, loss or optimizer. With
`profile` in its specification it lists the kernels of a step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import profiled
from benchmarks.measure import Memory, device_memory, finish, product_peak, read_spec, timed
from megalite.build import parts as build
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.launch.process import choose_device, configure_process, start_process_group
from megalite.mesh import Mesh
from megalite.model.parameters import head_unit, model_specs, stage_units
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
    trainer = Trainer(config, build.make_mesh(config), device)
    gc.collect()  # as the training loop does
    gc.freeze()
    gc.disable()
    seconds = timed(trainer.step, spec["warmup_steps"], spec["steps"])
    peak_memory, on_device = memory.peak_above(), device_memory(on)
    products = timed(step_products(config, trainer.mesh), 1, spec["product_steps"]) if spec["product_steps"] else []
    profile = profiled.look(trainer.step, on) if spec.get("profile") else None
    trainer.close()
    result = {
        "seconds": seconds,
        "product_seconds": products,
        "peak_rss_above_import": peak_memory,
        **on_device,
        "profile": profile,
        "matmul": torch.get_float32_matmul_precision(),
        "peak_flops": product_peak(spec["peak_size"], build.DTYPES[config.train.precision], device=on),
    }
    finish(spec, result if trainer.mesh.rank == 0 else None)


def step_products(config: Config, mesh: Mesh) -> Callable[[], None]:
    """A function that computes this rank's matrix products of one step, between barriers of all ranks."""
    shapes = linear_shapes(config, mesh)
    layers = sum(0 < unit < head_unit(config.model) for unit in stage_units(build.partition(config), mesh.pp.rank))
    rows = config.train.micro_batch_size * config.data.sequence_length
    dtype = build.DTYPES[config.train.precision]
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    activations = {width: torch.randn(rows, width).to(dtype) for shape in shapes for width in shape}
    heads, length = config.model.num_attention_heads // mesh.tp.size, config.data.sequence_length
    q = torch.randn(config.train.micro_batch_size * heads, length, config.model.head_size).to(dtype)
    scores = torch.randn(q.shape[0], length, length).to(dtype)

    def microbatch() -> None:
        for weight in weights:
            inputs, grads = activations[weight.shape[1]], activations[weight.shape[0]]
            torch.mm(inputs, weight.t())
            torch.mm(grads, weight)
            torch.mm(grads.t(), inputs)
        for _ in range(layers):
            for _ in range(2):  # query · key with its gradient by the probabilities, probabilities · value with its gradient by the values
                torch.bmm(q, q.mT)
                torch.bmm(scores, q)
                torch.bmm(scores.mT, q)

    def step() -> None:
        _barrier(mesh)
        for _ in range(build.layout(config).microbatches):
            microbatch()
        _barrier(mesh)

    return step


def linear_shapes(config: Config, mesh: Mesh) -> list[tuple[int, ...]]:
    """[out, in] of every weight that this rank multiplies with: all matrices except lookup tables."""
    parallel = config.parallel
    units = stage_units(build.partition(config), mesh.pp.rank)
    specs = model_specs(config.model, tp=parallel.tp, sequence_parallel=parallel.sequence_parallel, units=units)
    multiplied = [spec for spec in specs if spec.unit > 0 or spec.contributions == 2]  # a tied embedding counts, as it is also the head
    shapes = [spec.local_shape(mesh.coordinates) for spec in multiplied]
    return [shape for shape in shapes if len(shape) == 2]


def _barrier(mesh: Mesh) -> None:
    if mesh.world.size > 1:
        torch.distributed.barrier()


def describe(spec: dict[str, Any]) -> str:
    """A short description of the run for progress lines."""
    parallel, train = spec["config"]["parallel"], spec["config"]["train"]
    layout = " ".join(f"{axis}{parallel[axis]}" for axis in ("tp", "pp", "dp") if parallel[axis] > 1) or "one process"
    return f"megalite {train['precision']}{' compiled' if train['compile'] else ''}, {layout}"


if __name__ == "__main__":
    main()
