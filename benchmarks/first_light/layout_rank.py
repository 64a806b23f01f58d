"""One rank of the part layouts, started by `layouts.py`.

Run as `python -m megalite.launch.rank benchmarks.first_light.layout_rank DIRECTORY`. DIRECTORY/spec.json
selects the work: `probe` (one sum and one message), `layouts` (train each, rank 0 writes NUMBER.json and
NUMBER.npz), or `fit` (a whole run, which a fault ends). Two ranks that share a GPU pretend to be two nodes,
because NCCL rejects them on one node.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megalite.config.schema import Config


def share_the_gpu() -> None:
    """Make this rank the only one of its node, with loopback between nodes. Call before importing torch."""
    os.environ |= {
        "NCCL_HOSTID": f"first-light-{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def main() -> None:
    directory = Path(sys.argv[1])
    spec: dict[str, Any] = json.loads((directory / "spec.json").read_text(encoding="utf-8"))
    if spec["shared"]:
        share_the_gpu()
    from megalite.launch.process import choose_device, configure_process, shutdown, start_process_group

    device = choose_device()
    configure_process(device, spec.get("deterministic", False))
    start_process_group(device, spec["timeout"])
    act = {"probe": probe, "layouts": train_each, "fit": fit_until_the_end}[spec["act"]]
    act(spec, directory, device)
    shutdown()


def probe(spec: dict[str, Any], directory: Path, device: torch.device) -> None:
    """Sum over all ranks, and exchange a message in each direction.

    Raises:
        RuntimeError: a result is wrong.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.full((1 << 20,), float(rank + 1), device=device)
    dist.all_reduce(values)
    to, source = (rank + 1) % size, (rank - 1) % size
    arrived = torch.empty(16, device=device)
    operations = [
        dist.P2POp(dist.isend, torch.full_like(arrived, rank), to),
        dist.P2POp(dist.irecv, arrived, source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    received = values[0].item(), values[-1].item(), arrived[0].item()
    if received != (total := size * (size + 1) / 2, total, source):
        raise RuntimeError(f"expected the sum and message {(total, total, source)}, but got {received}")
    if rank == 0:
        (directory / "probe.json").write_text(
            json.dumps({"ranks": size, "backend": dist.get_backend()}), encoding="utf-8"
        )


def train_each(spec: dict[str, Any], directory: Path, device: torch.device) -> None:
    """Train on each layout.

    A failure on this rank ends the process, because the other ranks may be waiting for it.
    """
    from megalite.config.load import from_dict

    for number, config in spec["configs"]:
        train(number, from_dict(config), spec["steps"], directory, device)


def train(number: int, config: Config, steps: int, directory: Path, device: torch.device) -> None:
    """Train some steps, and write losses, norms, times, reserved memory and the final weights.

    With background saves, a checkpoint is saved halfway, and steps are resumed from it.
    """
    import numpy as np
    import torch
    from megalite_kernels import backend

    from megalite.assembly import parts as build
    from megalite.training.trainer import Trainer
    from megalite.training.verify import global_tensors

    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()  # the trainer before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    mesh = build.make_mesh(config)
    backend.select(config.train.kernels)
    trainer = Trainer(config, mesh, device)
    results, seconds = [], []
    for step in range(1, steps + 1):
        started = time.perf_counter()
        results.append(trainer.step())
        seconds.append(time.perf_counter() - started)
        if config.checkpoint.async_save and step == steps // 2:
            save = trainer.begin_save()
    if config.checkpoint.async_save:
        trainer.saver.wait()
        if save.error is not None:
            raise save.error
        trainer.close()
        config.checkpoint.load = str(save.directory)
        trainer = Trainer(config, mesh, device)
        results = results[: steps // 2] + [trainer.step() for _ in range(steps - steps // 2)]
    weights = global_tensors(trainer)
    trainer.close()
    if mesh.rank == 0:
        arrays: dict[str, Any] = {name: tensor.float().numpy() for name, tensor in weights.items()}
        np.savez(directory / f"{number}.npz", **arrays)
        scalars = [{"loss": result.loss, "grad_norm": result.grad_norm} for result in results]
        reserved = torch.cuda.max_memory_reserved(device) / 2**30 if on_gpu else None
        results_of_run = {"scalars": scalars, "seconds": seconds, "reserved_gib": reserved}
        (directory / f"{number}.json").write_text(json.dumps(results_of_run), encoding="utf-8")


def fit_until_the_end(spec: dict[str, Any], directory: Path, device: torch.device) -> None:
    """Train like `megalite train`, with a rank that is killed. The others must exit and identify it."""
    from megalite.assembly import parts as build
    from megalite.config.load import from_dict
    from megalite.launch.process import exit_after_failure
    from megalite.parallel.collectives import CommunicationError
    from megalite.training.fit import fit
    from megalite.training.trainer import Trainer
    from megalite.training.watchdog import Watchdog

    config = from_dict(spec["config"])
    trainer = Trainer(config, build.make_mesh(config), device)
    try:
        with Watchdog(config, trainer.mesh, trainer.run_dir):
            fit(trainer)
    except CommunicationError as error:
        exit_after_failure(error)
    trainer.close()


if __name__ == "__main__":
    main()
