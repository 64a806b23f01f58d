"""One measured world: `python -m benchmarks.scaling_run SPEC.json`, under torchrun for more than one rank."""

from __future__ import annotations

import gc
from typing import Any

import torch

from benchmarks.measure import finish, read_spec, timed
from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.launch.process import choose_device, configure_process, start_process_group, world_size
from megalite.training.trainer import Trainer


def main() -> None:
    spec = read_spec()
    seconds = measure(spec, prepare(spec))
    finish(spec, {"seconds": seconds} if world_size() == 1 or torch.distributed.get_rank() == 0 else None)


def prepare(spec: dict[str, Any]) -> torch.device:
    """Join the other ranks, once per process. Return the device of this rank."""
    device = choose_device() if spec["device"] == "cuda" else torch.device("cpu")
    if device.type != spec["device"]:
        raise RuntimeError(
            f"this machine has {torch.cuda.device_count()} GPUs, but every rank requires its own: "
            "use smaller --worlds"
        )
    torch.set_num_threads(spec["threads"])
    configure_process(device)
    if world_size() > 1 and not torch.distributed.is_initialized():
        start_process_group(device, "30m")
    return device


def measure(spec: dict[str, Any], device: torch.device) -> list[list[float]]:
    """Return the seconds of the steps of each configuration on this rank.

    Equal configurations are trained once.
    """
    seconds: list[list[float]] = []
    for number, tree in enumerate(spec["configs"]):
        if tree in spec["configs"][:number]:
            seconds.append(seconds[spec["configs"].index(tree)])
            continue
        config = from_dict(tree)
        trainer = Trainer(config, build.make_mesh(config), device)
        gc.collect()
        gc.disable()  # as the training loop does
        seconds.append(timed(trainer.step, spec["warmup_steps"], spec["steps"]))
        gc.enable()
        trainer.close()
        del trainer  # frees its memory for the next one
    return seconds


if __name__ == "__main__":
    main()
