"""Train a model: `megalite train --nproc N --config FILE.yaml [--tp N --pp N --dp N] [--section.key VALUE
…]`.

Without `--nproc` it is one process, or one of those that torchrun has started: `torchrun --nproc-per-node N
-m megalite train …`. `--help` lists every option, `--print_config` prints the resolved configuration. `python
pretrain.py` is the same in a checkout.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from megalite.commands import start_ranks
from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.load import exit_with, load, tell_torchrun, write_config
from megalite.config.schema import Config
from megalite.launch import signals, spares
from megalite.launch.causes import Lost, lost_by
from megalite.launch.environment import set_variables
from megalite.launch.exit_status import ExitStatus, process_status, training_status
from megalite.system.messages import say
from megalite.system.processes import launched

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from megalite.config.precision import PrecisionChoice
    from megalite.launch.environment import RankEnvironment
    from megalite.mesh.mesh import Mesh
    from megalite.planner.api import Device
    from megalite.training.job import Job
    from megalite.training.trainer import Trainer


def main() -> int:
    """Run one rank of a run, from its options to its end. Returns the exit status of this process."""
    if "--dry_run" in sys.argv:
        from megalite.commands.dry_run import main as dry_run

        dry_run()
        return 0
    if start_ranks.wanted(sys.argv[1:]):
        return start_ranks.main(sys.argv[1:])
    # before torch is imported: a wrong option is reported at once
    loaded = load(world_size=int(os.environ.get("WORLD_SIZE", "1")))
    config = loaded.config
    if config.parallel.min_ranks is not None:
        spares.leave_out(ParallelDims.of(config).world)
    # also before: set after the first use of a device, some have no effect
    remarks = set_variables(config.network)
    if not launched() and os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
        say("starting …")  # importing torch takes seconds

    import torch

    from megalite.checkpoint import CheckpointError
    from megalite.checkpoint.agreement import raise_on_all_ranks
    from megalite.monitoring.observers import observers
    from megalite.parallel.collectives import CommunicationError
    from megalite.parallel.recheck.runtime import CorruptionError
    from megalite.parallel.sharding.offload import OffloadError
    from megalite.training.bad_steps import FaultLimit
    from megalite.training.fit import fit
    from megalite.training.kernel_choice import kernels
    from megalite.training.trainer import Trainer
    from megalite.training.watchdog import Watchdog, raised_on_all_ranks

    device, hardware, lines = check_run(config, loaded.choice)
    remarks += lines
    job, environment, mesh, notes = start(config, device)
    failures = (
        ConfigError,
        CheckpointError,
        FaultLimit,
        CorruptionError,
        CommunicationError,
        OffloadError,
        torch.OutOfMemoryError,
        OSError,
    )
    trainer: Trainer | None = None
    try:
        with Watchdog(
            config, mesh, config.run.directory, partial(end_hanging, config=config, mesh=mesh, job=job)
        ):
            trainer = Trainer(config, mesh, device, job.restarted)
            job.running(trainer.step_done)
            trainer.saver.uploads = job.uploads
            announce(trainer, remarks + notes)
            status = fit(trainer, observers(trainer, environment, hardware, kernels(trainer)))
        signals.end_training_on_signal(" after the last step; everything is saved")
        trainer.close()
        if job.uploads is not None:
            with raise_on_all_ranks(mesh, CheckpointError):
                job.uploads.wait()
    except failures as error:
        status = ExitStatus.FAILED if trainer else ExitStatus.CONFIGURATION
        if isinstance(error, CorruptionError):
            status = ExitStatus.CORRUPTED
        on_all_ranks = raised_on_all_ranks(error, mesh.activity)
        end_run(error, config, device, mesh, job, status if on_all_ranks else None)
    except Exception as error:  # a fault of ours, or one of the device: its traceback is wanted
        report_unexpected(error, config, mesh, job)
        raise
    job.end(status)
    spares.dismiss(status)
    return process_status(status)


def report_unexpected(error: Exception, config: Config, mesh: Mesh, job: Job) -> None:
    """Leave what is known of an error that is being handled and has no message for the user."""
    import torch

    lost, message = lost_by(error), f"{type(error).__name__}: {error}"
    job.end(ExitStatus.FAILED, (lost and lost.reason) or str(error))
    known: dict[str, Any] = {"device": True} if isinstance(error, torch.AcceleratorError) else {}
    tell_torchrun(message, **known, **({} if lost is None else {"lost": asdict(lost)}))
    report_crash(message, lost, config, mesh, job, traceback.format_exc())


def check_run(
    config: Config, choice: PrecisionChoice | None = None
) -> tuple[torch.device, Device | None, list[str]]:
    """Choose the device, and check what needs it and the data, before any process group starts. Returns it,
    what the planner knows of it, and lines that rank 0 prints.

    Args:
        choice: what train.precision = auto has become. Changed in the configuration if torch sees another
            device than was expected.
    """
    import torch

    from megalite.assembly import parts as build
    from megalite.assembly.fp8_matrices import check_fp8, describe_fp8
    from megalite.assembly.mup_rates import describe_mup
    from megalite.config import token_files
    from megalite.config.precision import of_device
    from megalite.config.rules import check
    from megalite.data import dataset
    from megalite.launch.machine import local_world_size
    from megalite.launch.process import choose_device, world_size
    from megalite.monitoring.trackers.selection import check_packages
    from megalite.planner.api import device_of_run
    from megalite.training import recompute_budget, reference, teacher
    from megalite.training.objective_trial import try_objective
    from megalite.training.optimizer_trial import try_optimizer
    from megalite.training.tokenizer_checks import check_stream_vocabulary, check_tokenizers

    try:
        device = choose_device()
        # a driver without torch's support for it, or the reverse
        if choice is not None and choice.device not in (None, device.type):
            choice = of_device("cuda" if device.type == "cuda" else "cpu")
            config.train.precision = choice.precision  # type: ignore[assignment]
        check(config, world_size(), int(device.type == "cuda"))
        try_objective(config)
        try_optimizer(config)
        check_packages(config.logging)
        build.check_offload(config, device, local_world_size() / world_size())
        check_fp8(config, device)
        recompute_budget.check(config, device)
        hardware = device_of_run(config, torch.cuda.get_device_name(device) if device.type == "cuda" else "")
        # a damaged token file must not be found when every rank is waiting
        data, validation = dataset.build(config.data, config.run.seed)
        reference.attach_stored(config, data, validation)
        remarks = [choice.describe()] if choice is not None else []
        check_stream_vocabulary(config, data.vocab_size)
        remarks += check_tokenizers(config, data.fingerprint) + token_files.remarks(config)
        remarks += teacher.check(config, world_size()) + describe_fp8(config)
        remarks += describe_mup(config)
        remarks += reference.describe(config)
    except ConfigError as error:
        exit_with(str(error))
    return device, hardware, remarks


def start(config: Config, device: torch.device) -> tuple[Job, RankEnvironment, Mesh, list[str]]:
    """Claim the run's directory, start the process group and make the mesh. Returns them with lines that rank
    0 prints. Collective."""
    from megalite.assembly import parts as build
    from megalite.launch.environment import compare_ranks, facts
    from megalite.launch.machine import local_world_size
    from megalite.launch.process import configure_process, start_process_group
    from megalite.monitoring import links
    from megalite.training.fault_injection import restarts
    from megalite.training.job import Job, JobEnd, begin
    from megalite.training.matmul_choice import choose

    configure_process(device, config.run.deterministic)
    # auto, on machines that differ
    environment = facts(device, local_world_size()) | {"train.precision": config.train.precision}
    jobs, notes = list[Job](), list[str]()

    def meet(store: Store | None = None, rank: int = 0, size: int = 1) -> None:
        """Before the process group exists: ranks that differ could not communicate, and a job that is refused
        must not wait for others."""
        restarted = restarts() > 0
        if store is not None:
            store.add("restarted", int(restarted))  # a rank of a new node counts no restart: all agree
            # waits for all ranks
            notes.extend(compare_ranks(environment, store, rank, size, tp=config.parallel.tp))
            restarted = store.add("restarted", 0) > 0
        job, lines = begin(config, restarted=restarted, rank=rank, store=store)
        signals.end_training_on_signal(
            " before the first step", before=lambda number: job.end(training_status(number))
        )
        jobs.append(job)
        notes.extend(lines)

    try:
        start_process_group(device, config.run.timeout, meet)
    except ConfigError as error:
        exit_with(str(error))
    except JobEnd as end:
        exit_with(str(end), status=process_status(end.status))
    mesh = build.make_mesh(config)
    if config.network.test and mesh.world.size > 1:
        notes.append(links.describe(links.measure(mesh, device)))
    try:
        notes += choose(config, mesh, device)
    except ConfigError as error:
        end_run(error, config, device, mesh, jobs[0], ExitStatus.CONFIGURATION)
    return jobs[0], environment, mesh, notes


def announce(trainer: Trainer, notes: list[str]) -> None:
    """Store the resolved configuration and print what runs where. Collective."""
    from megalite.mesh.map import describe
    from megalite.monitoring.epochs import repeated
    from megalite.monitoring.size_changes import describe_change
    from megalite.training import recompute_budget
    from megalite.training.checkpointing import describe_saves
    from megalite.training.kernel_choice import on_gpu
    from megalite.training.memory_report import report

    notes[:0] = [*random_weights(trainer), *ignored_fields(trainer.config), *describe_change(trainer)]
    notes += [*on_gpu(trainer), *placement(trainer), *repeated(trainer), *report(trainer)]
    notes += [
        *recompute_budget.describe(trainer.config, trainer.mesh, trainer.device),
        describe_saves(trainer.config),
    ]
    mesh, device = trainer.mesh, trainer.device
    if mesh.rank == 0:
        write_config(trainer.config, trainer.run_dir)
        backend = "one process" if mesh.world.size == 1 else "NCCL" if device.type == "cuda" else "gloo"
        print(
            f"{describe(mesh.dims)}\n{backend} on {device.type}, {trainer.parameters:,} parameters, "
            f"{trainer.run_dir}",
            flush=True,
        )
        print("\n".join(notes), flush=True)


def placement(trainer: Trainer) -> list[str]:
    """Suggest a layout that fits the nodes of this machine better, if there is one."""
    from megalite.launch.machine import local_world_size
    from megalite.planner.plans import zero2_hint

    between = zero2_hint(trainer.config, trainer.mesh.world.size, local_world_size())
    return [] if between is None else [between]


def random_weights(trainer: Trainer) -> list[str]:
    """Warn about random weights in a run with the shape of a Hugging Face model."""
    model = trainer.config.model
    if model.from_hf is None or model.initial_weights is not None or trainer.step_done > 0:
        return []
    intent = (
        "as requested by model.init_from=none"
        if model.init_from
        else f"to load the weights, set model.init_from=hf:{model.from_hf}"
    )
    return [
        f"the weights are initialized randomly: model.from_hf={model.from_hf} only sets the shape; {intent}"
    ]


def ignored_fields(config: Config) -> list[str]:
    """Return a line about ignored fields in the config.json of model.from_hf."""
    from megalite.families.model_config import hf_config, unread_note

    if config.model.from_hf is None:
        return []
    with suppress(ConfigError):  # a resumed run does not need the directory any more
        return unread_note(hf_config(config.model.from_hf))
    return []


def end_run(
    error: Exception, config: Config, device: torch.device, mesh: Mesh, job: Job, status: ExitStatus | None
) -> NoReturn:
    """End the process with one message.

    Args:
        status: set if every rank ends with the same error.
    """
    import torch

    from megalite.launch.process import exit_after_failure
    from megalite.monitoring.out_of_memory import out_of_memory

    lost = lost_by(error)
    job.end(status or ExitStatus.FAILED, (lost and lost.reason) or str(error))
    report = partial(report_crash, config=config, mesh=mesh, job=job)
    if status is not None:
        if status in (ExitStatus.FAILED, ExitStatus.CORRUPTED):
            report(str(error), None)
        exit_with(str(error), status=process_status(status))
    if isinstance(error, torch.OutOfMemoryError):
        exit_after_failure(out_of_memory(error, config, device, mesh), "it ran out of memory", report)
    exit_after_failure(error, str(error) if isinstance(error, OSError) else "", report)


def end_hanging(message: str, lost: Lost, config: Config, mesh: Mesh, job: Job) -> None:
    """Record the end of a rank whose training thread hangs. Called by the watchdog."""
    job.end(ExitStatus.FAILED, lost.reason or message)
    report_crash(message, lost, config, mesh, job)


def report_crash(
    message: str, lost: Lost | None, config: Config, mesh: Mesh, job: Job, trace: str = ""
) -> None:
    """Write this rank's part of crash.md.

    Args:
        lost: what it has lost; None: it failed by itself.
    """
    from megalite.launch import crash

    failed = partial(
        crash.rank_failed, activity=mesh.activity, since=job.since, job=job.name, kills=job.kills
    )
    failed(config, mesh.rank, message, trace=trace, lost=lost)
