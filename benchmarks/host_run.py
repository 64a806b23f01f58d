"""Measured steps of small models: `python -m benchmarks.host_run SPEC.json`.

On one process megalite's trainer and transformers' loop run alternately, so that both see the same machine,
caches and settings; then what a step calls is counted. Of several ranks, which torchrun starts, only
megalite's steps are measured. Every program is measured with two depths: their difference is that of layers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.counting import counts, of_a_layer
from benchmarks.measure import finish, read_spec
from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.launch.process import configure_process, start_process_group
from megalite.training.trainer import Trainer

Step = Callable[[], object]
Times = list[tuple[float, float]]  # wall and processor seconds of each step


def alternating(steps: Sequence[Step], warmup: int, rounds: int) -> list[Times]:
    """Return the times of programs of which each runs a step a round, in every second round in reverse order.

    Garbage is collected between rounds.
    """
    times: list[Times] = [[] for _ in steps]
    for number in range(warmup + rounds):
        gc.collect()
        for index in range(len(steps))[:: -1 if number % 2 else 1]:
            wall, processor = perf_counter(), process_time()
            steps[index]()
            if number >= warmup:
                times[index].append((perf_counter() - wall, process_time() - processor))
    return times


def with_layers(content: dict[str, Any], layers: int) -> Config:
    return from_dict({**content, "model": {**content["model"], "num_hidden_layers": layers}})


def main() -> None:
    spec = read_spec()
    device, depths = torch.device("cpu"), [with_layers(spec["config"], layers) for layers in spec["layers"]]
    torch.set_num_threads(spec["threads"])
    configure_process(device)
    start_process_group(device, depths[0].run.timeout)
    torch.set_float32_matmul_precision(spec["matmul"])  # of both programs
    trainers = [Trainer(each, build.make_mesh(each), device) for each in depths]
    programs: dict[str, list[Step]] = {"own": [trainer.step for trainer in trainers]}
    if spec["peer"]:
        from benchmarks.transformers_peer import training_step

        programs["peer"] = [training_step(each)[1] for each in depths]
    gc.collect()  # as the training loop does
    gc.freeze()
    gc.disable()
    times = [
        alternating(steps, spec["warmup_steps"], spec["steps"])
        for steps in zip(*programs.values(), strict=True)
    ]
    result: dict[str, Any] = {}
    for index, (name, steps) in enumerate(programs.items()):
        walls, processors = zip(*(_columns(depth[index]) for depth in times), strict=True)
        result[name] = {"seconds": walls[0], "shallow_seconds": walls[1]}
        result[name] |= {"processor_seconds": processors[0], "shallow_processor_seconds": processors[1]}
        if spec["peer"]:
            deep, shallow = spec["layers"]
            result[name]["counts"] = of_a_layer(counts(steps[0]), counts(steps[1]), deep - shallow)
    for trainer in trainers:
        trainer.close()
    finish(spec, result if trainers[0].mesh.rank == 0 else None)


def _columns(times: Times) -> tuple[list[float], list[float]]:
    """Return the wall and the processor seconds, the latter as the mean over all ranks."""
    wall, processor = (list(column) for column in zip(*times, strict=True))
    if dist.is_initialized():
        means = torch.tensor(processor, dtype=torch.float64)
        dist.all_reduce(means)
        processor = (means / dist.get_world_size()).tolist()
    return wall, processor


if __name__ == "__main__":
    main()
