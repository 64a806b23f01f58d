"""Train a model: `torchrun --nproc-per-node N -m megalite train --config FILE.yaml|NAME [--tp N --pp N --dp N] [--section.key VALUE …]`.

`megalite train --config FILE.yaml|NAME` is one process. `--help` lists every option, `--print_config` prints the resolved configuration,
`--list_configs` the configurations that come with megalite.
"""

from __future__ import annotations

import sys

from megalite.config.load import exit_with, load_config, write_config
from megalite.config.schema import ConfigError
from megalite.launch.process import choose_device, configure_process, exit_after_failure, local_world_size, start_process_group, world_size


def main() -> None:
    if "--dry_run" in sys.argv:
        from megalite.commands.dry_run import main as dry_run

        return dry_run()
    config = load_config(world_size=world_size())

    import torch

    from megalite.build import parts as build
    from megalite.checkpoint import CheckpointError
    from megalite.config.rules import check
    from megalite.data import dataset
    from megalite.launch.environment import compare_ranks, facts, set_variables
    from megalite.mesh import describe
    from megalite.monitoring import links
    from megalite.monitoring.metrics import check_packages
    from megalite.monitoring.observers import observers
    from megalite.monitoring.out_of_memory import out_of_memory
    from megalite.parallel.collectives import CommunicationError
    from megalite.parallel.sharding.offload import OffloadError
    from megalite.planning.predicting import device_of
    from megalite.training.fit import fit
    from megalite.training.guard import FaultLimit
    from megalite.training.memory_report import report
    from megalite.training.trainer import Trainer

    device = choose_device()
    try:
        check(config, world_size(), int(device.type == "cuda"))
        check_packages(config.logging)
        build.check_offload(config, device, local_world_size() / world_size())
        hardware = device_of(config, torch.cuda.get_device_name(device) if device.type == "cuda" else "")
        dataset.build(config.data, config.run.seed)  # a damaged token file must not be found when every rank is waiting
    except ConfigError as error:
        exit_with(str(error))
    configure_process(device, config.run.deterministic)
    notes = set_variables(config.network)
    try:
        own = facts(device, local_world_size())
        start_process_group(device, config.run.timeout, lambda *place: notes.extend(compare_ranks(own, *place, tp=config.parallel.tp)))
    except ConfigError as error:
        exit_with(str(error))
    mesh = build.make_mesh(config)
    if config.network.test and mesh.world.size > 1:
        notes.append(links.describe(links.measure(mesh, device)))
    try:
        trainer = Trainer(config, mesh, device)
    except (ConfigError, CheckpointError) as error:  # a checkpoint that this run must not continue: every rank finds the same
        exit_with(str(error))
    except torch.OutOfMemoryError as error:
        exit_after_failure(out_of_memory(error, config, device, mesh), "it ran out of memory")
    except (CommunicationError, OffloadError) as error:
        exit_after_failure(error)
    notes += report(trainer)
    if mesh.rank == 0:
        write_config(config, trainer.run_dir)
        backend = "one process" if mesh.world.size == 1 else "NCCL" if device.type == "cuda" else "gloo"
        print(f"{describe(mesh.dims)}\n{backend} on {device.type}, {trainer.parameters:,} parameters, {trainer.run_dir}", flush=True)
        print("\n".join(notes), flush=True)
    try:
        fit(trainer, observers(trainer, own, hardware))
        trainer.close()
    except (CheckpointError, FaultLimit) as error:  # one that could not be written, or steps that stay bad: every rank hears of it
        exit_with(str(error), status=1)
    except torch.OutOfMemoryError as error:
        exit_after_failure(out_of_memory(error, config, device, mesh), "it ran out of memory")
    except (CommunicationError, OffloadError, ConfigError) as error:
        exit_after_failure(error)
