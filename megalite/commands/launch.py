"""Print a job for a cluster that runs `megalite train`, or submit it.

    megalite launch --on slurm --config llama-3-8b --tp 8 --pp 2 --dp 2 --time 24h
    megalite launch --on kubernetes --image IMG --mount claim:/shared --run.dir /shared/runs --config run.yaml
    megalite launch --on ray --run.dir /shared/runs --config run.yaml --submit

All other options are options of `megalite train`. The layout gives the number of ranks, tp · pp · cp · dp,
which must fill the nodes; without --dp, dp fills --nnodes. No data is read: it need not be on this machine.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megalite
from megalite.commands.parser import Parser, as_new_file, positive, write_whole
from megalite.config.errors import ConfigError
from megalite.launch.cluster.job import ClusterJob, Mount, Nodes, job_name, nodes_for_world

if TYPE_CHECKING:
    from megalite.config.arguments import Arguments
    from megalite.config.schema import Config

PER_NODE = 8
"""GPUs of a node, unless profiling.hardware describes it."""
PORT, GRACE = 29500, "5m"
FILES = {"slurm": ".sbatch", "kubernetes": ".yaml", "ray": ".ray.py", "skypilot": ".sky.yaml"}
"""Scheduler → how the name of its specification ends."""


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    words = sys.argv[1:] if argv is None else argv
    options, rest = tool.parse_known_args(words)
    given = vars(options)
    try:
        check_scheduler(options.on, given)
        name, text = specification(options, rest, [*tool.prog.split(), *words])
        output = given.get("output") or Path(f"{name}{FILES[options.on]}")
        if "output" not in given and not options.submit:
            print(text, end="", flush=True)
            return 0
        write_whole(output, text)
    except (ConfigError, OSError) as error:
        tool.error(error, given.get("output"))
    if not options.submit:
        print(f"wrote {output}; submit it with: {shlex.join(submission(options.on, output, given))}")
        return 0
    return submit(tool, submission(options.on, output, given))


def parser() -> Parser:
    """Options without a default are absent if they are not given, so that those of other schedulers can be
    rejected."""
    tool = Parser(
        prog="megalite launch", description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    add = tool.add_argument
    add("--on", choices=tuple(FILES), required=True, help="the scheduler")
    add("--submit", action="store_true", default=False, help="submit the job, after writing it to --output")
    add(
        "--output",
        type=as_new_file,
        metavar="FILE",
        help="write to FILE (default: print; with --submit the job's name with .sbatch, .yaml, .ray.py or "
        ".sky.yaml)",
    )
    _add_common(tool)
    for group in GROUPS:
        _add_group(tool, group)
    return tool


def _add_common(tool: Parser) -> None:
    add = tool.add_argument_group("the job").add_argument
    add("--nnodes", type=positive, metavar="N", help="number of nodes (default: those that the layout fills)")
    add(
        "--nproc",
        type=positive,
        metavar="N",
        help="ranks per node, one for each GPU (default: the GPUs of a node of profiling.hardware, or "
        f"{PER_NODE})",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: request no GPUs (default cuda)")
    add("--name", metavar="NAME", help="name of the job (default: run.name)")
    add(
        "--python",
        metavar="PATH",
        help="interpreter on the nodes (default: with SLURM this one, with Ray that of its workers, else "
        "python)",
    )
    add("--image", metavar="IMAGE", help="container image with megalite")
    add(
        "--mount",
        action="append",
        metavar="SOURCE:TARGET[:ro]",
        help="directory of the ranks; SOURCE is a path, on Kubernetes a volume claim or a path of hosts, "
        "with SkyPilot a volume, a bucket or a path here",
    )
    add("--env", action="append", type=_pair, metavar="NAME=VALUE", help="environment variable of the ranks")
    add("--max_restarts", type=_count, default=3, metavar="K", help="restarts after failures (default 3)")
    add("--grace", metavar="TIME", help=f"time to save before the job is ended (default {GRACE})")
    add("--time", metavar="TIME", help="time limit, such as 24h (SLURM, Kubernetes; default: the cluster's)")
    add(
        "--port",
        type=positive,
        metavar="PORT",
        help=f"of the rendezvous on the first node (default {PORT})",
    )
    add(
        "--cpus",
        type=positive,
        metavar="N",
        help="cores per node (default: not requested; Ray: one per rank)",
    )
    add(
        "--memory",
        metavar="SIZE",
        help="memory per node, as the scheduler writes it (default: not requested)",
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of restarts such as 3")
    return int(text)


GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "slurm": {
        "account": {"help": "account (default: yours)"},
        "partition": {"help": "partition (default: the cluster's)"},
        "sbatch": {
            "action": "append",
            "metavar": "OPTION",
            "help": "a further option of sbatch, for example --sbatch qos=high or --sbatch exclusive",
        },
        "container": {"choices": ("pyxis", "apptainer"), "help": "what runs --image (default pyxis)"},
    },
    "kubernetes": {
        "kind": {
            "choices": ("trainjob", "jobset"),
            "help": "a TrainJob of Kubeflow Trainer v2 (default), or a JobSet",
        },
        "namespace": {"help": "namespace (default: that of kubectl)"},
        "runtime": {"help": "ClusterTrainingRuntime of a TrainJob (default torch-distributed)"},
        "gpu_resource": {"help": "name of GPUs as a resource (default nvidia.com/gpu)"},
        "resource": {
            "action": "append",
            "metavar": "NAME=AMOUNT",
            "type": _pair,
            "help": "further resource of a node, for example rdma/hca=1",
        },
        "toleration": {
            "action": "append",
            "metavar": "KEY[=VALUE]:EFFECT",
            "help": "toleration, besides that of the GPUs",
        },
        "node_selector": {
            "action": "append",
            "type": _pair,
            "metavar": "NAME=VALUE",
            "help": "label of the nodes",
        },
        "shared_memory": {"metavar": "SIZE", "help": "size of /dev/shm (default: 1Gi for each rank)"},
        "host_network": {"action": "store_true", "help": "use the network of the hosts (with --kind jobset)"},
    },
    "ray": {
        "address": {"help": "address of the cluster for ray job submit (default: RAY_ADDRESS)"},
        "min_nodes": {
            "type": positive,
            "metavar": "N",
            "help": "continue with fewer nodes after a loss, down to N; needs a parallel.dp that is not set",
        },
        "storage": {
            "metavar": "DIR",
            "help": "shared directory, or URL, for Ray Train's own files (default: in run.dir; required if "
            "that is in an object store)",
        },
    },
    "skypilot": {
        "gpu": {"metavar": "NAME", "help": "SkyPilot's name of the GPUs, for example H100"},
        "infra": {"help": "cloud, region and zone, for example aws/us-east-1 (default: the cheapest)"},
        "spot": {"action": "store_true", "help": "machines that may be preempted"},
        "workdir": {"metavar": "DIR", "help": "directory that is copied to the nodes, where the run starts"},
        "setup": {"metavar": "COMMAND", "help": "installs megalite on a new machine"},
    },
}
"""Scheduler → its own options."""
UNSUPPORTED = {
    "ray": {
        "image": "the image of a Ray cluster is part of the cluster",
        "mount": "the file systems of a Ray cluster are part of the cluster",
        "memory": "Ray does not limit memory",
        "time": "Ray has no time limit; set --train.stop_after",
        "grace": "Ray sends no signal before it ends a job",
        "port": "the workers choose a free one",
    },
    "skypilot": {
        "time": "SkyPilot has no time limit; set --train.stop_after",
        "grace": "SkyPilot sends no signal before it ends a job",
    },
}
"""Scheduler → common options that it does not have, and why."""


def _add_group(tool: Parser, scheduler: str) -> None:
    group = tool.add_argument_group(f"with --on {scheduler}")
    for name, settings in GROUPS[scheduler].items():
        plain = "action" not in settings and "choices" not in settings and "metavar" not in settings
        shown = {"metavar": name.upper()} if plain else {}
        group.add_argument(f"--{name}", **{**shown, **settings})


def check_scheduler(on: str, given: dict[str, Any]) -> None:
    """Raise ConfigError for an option that the scheduler does not have."""
    for other, group in GROUPS.items():
        if other != on and (wrong := next((name for name in group if name in given), None)):
            raise ConfigError(f"--{wrong} is only valid with --on {other}, got --on {on}. Remove it.")
    for name, why in UNSUPPORTED.get(on, {}).items():
        if name in given:
            raise ConfigError(f"--{name} is not supported with --on {on}: {why}. Remove it.")


def specification(
    options: argparse.Namespace, rest: Sequence[str], command: Sequence[str]
) -> tuple[str, str]:
    """The name and the text of the job. Raises ConfigError."""
    given = vars(options)
    arguments, config, nodes = read_run(options, rest)
    job = ClusterJob(
        name=name_of(given.get("name"), config),
        about=about(arguments, config, nodes, command),
        nodes=nodes,
        gpus=options.device == "cuda",
        arguments=tuple(rest),
        python=given.get("python") or default_python(options),
        environment=dict(given.get("env", ())),
        mounts=tuple(map(Mount.read, given.get("mount", ()))),
        image=given.get("image"),
        restarts=options.max_restarts,
        port=given.get("port", PORT),
        cpus=given.get("cpus"),
        memory=given.get("memory"),
        grace_s=_seconds("grace", given.get("grace", GRACE)),
        time_s=_seconds("time", options.time) if "time" in given else None,
    )
    return job.name, WRITERS[options.on](job, given, config, arguments)


def _for_slurm(job: ClusterJob, given: dict[str, Any], config: Config, arguments: Arguments) -> str:
    from megalite.launch.cluster.slurm import Slurm, script

    own = _own("slurm", given)
    return script(job, Slurm(directives=tuple(own.pop("sbatch", ())), **own))


def _for_kubernetes(job: ClusterJob, given: dict[str, Any], config: Config, arguments: Arguments) -> str:
    from megalite.launch.cluster.kubernetes import CONFIGS, Kubernetes, manifests

    own = _own("kubernetes", given)
    lists: dict[str, Any] = {"tolerations": tuple(own.pop("toleration", ()))}
    lists |= {f"{name}s": dict(own.pop(name, ())) for name in ("resource", "node_selector")}
    if "port" in given and own.get("kind") != "jobset":
        raise ConfigError("--port is not supported with --kind trainjob: Trainer sets the port. Remove it.")
    check_run_dir(job, config, "the file system of a pod is lost with it")
    job, files = with_files(job, arguments, CONFIGS)
    return manifests(job, Kubernetes(**own, **lists), files)


def _for_ray(job: ClusterJob, given: dict[str, Any], config: Config, arguments: Arguments) -> str:
    from megalite.launch.cluster.ray_job import Ray, program

    own = _own("ray", given)
    check_fewer_nodes(job, own.get("min_nodes"), arguments)
    job = with_paths(job, _paths_on_ray(arguments, copied_by_ray(given.get("output", Path(".")))))
    return program(job, Ray(**own), config.run.dir)


def copied_by_ray(program: Path) -> Path:
    """The directory that Ray copies to the nodes: the current one, or that of a program elsewhere."""
    inside = program.resolve().is_relative_to(Path.cwd().resolve())
    return Path(".") if inside else program.resolve().parent


def _paths_on_ray(arguments: Arguments, copied: Path) -> dict[str, str]:
    """Configuration files by their paths in the directory that Ray copies; notes those that are elsewhere."""
    paths: dict[str, str] = {}
    for each, path in own_files(arguments).items():
        if path.resolve().is_relative_to(copied.resolve()):
            paths[each] = str(path.resolve().relative_to(copied.resolve()))
        else:
            print(
                f"Note: --config {each} is not below {copied.resolve()}, which Ray copies to the nodes. They "
                "must have it at the same path.",
                file=sys.stderr,
            )
    return paths


def _for_skypilot(job: ClusterJob, given: dict[str, Any], config: Config, arguments: Arguments) -> str:
    from megalite.launch.cluster.skypilot import CONFIGS, SkyPilot, task

    check_run_dir(job, config, "a new machine starts with an empty disk")
    job, files = with_files(job, arguments, CONFIGS)
    return task(job, SkyPilot(**_own("skypilot", given)), files)


WRITERS = {"slurm": _for_slurm, "kubernetes": _for_kubernetes, "ray": _for_ray, "skypilot": _for_skypilot}


def _own(scheduler: str, given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in GROUPS[scheduler] if name in given}


def _seconds(option: str, text: str) -> int:
    from megalite.config.amounts import duration_seconds

    seconds = duration_seconds(text)
    if not seconds:
        raise ConfigError(
            f"--{option} {text} is not a duration. Use hours, minutes and seconds: 24h, 90m or 300s."
        )
    return seconds


def default_python(options: argparse.Namespace) -> str:
    """This interpreter where the nodes share its file system, on Ray that of its workers (empty), otherwise
    the one in the image."""
    if options.on == "ray":
        return ""
    return sys.executable if options.on == "slurm" and "image" not in vars(options) else "python"


def read_run(options: argparse.Namespace, rest: Sequence[str]) -> tuple[Arguments, Config, Nodes]:
    """Read and check the configuration, apart from files that may be on the cluster alone.

    Returns the arguments, the configuration, and the nodes that its layout fills. Raises ConfigError.
    """
    from megalite.config.arguments import read_arguments
    from megalite.config.load import given as values_of

    own = [action.dest for action in parser()._actions]
    arguments = read_arguments(list(rest), own)
    values, known = values_of(arguments).values, vars(options)
    axes = {axis: int(values.get(f"parallel.{axis}") or 1) for axis in ("tp", "pp", "cp")}
    replica, dp = axes["tp"] * axes["pp"] * axes["cp"], values.get("parallel.dp")
    nnodes, nproc = known.get("nnodes"), known.get("nproc")
    layout = " · ".join(f"{axis} {size}" for axis, size in [*axes.items(), ("dp", dp or 1)])
    hardware = values.get("profiling.hardware")
    per_node = gpus_per_node(hardware, known.get("gpu")) if options.device == "cuda" else None
    nodes = nodes_for_world(replica * dp if dp else None, nnodes, nproc, per_node, layout)
    return arguments, checked(arguments, nodes.world, options.device), nodes


def gpus_per_node(hardware: str | None, gpu: str | None) -> int:
    """GPUs of a node, as far as the planner knows the hardware.

    Args:
        gpu: SkyPilot's name, which is the planner's in other letters for most devices.
    """
    from megalite.planner.api import HardwareError, find_device, known_devices

    name = (
        gpu.lower() if hardware is None and gpu is not None and gpu.lower() in known_devices() else hardware
    )
    if name is None:
        return PER_NODE
    try:
        return find_device(name).per_node
    except HardwareError as error:
        raise ConfigError(str(error).replace("--gpu", "profiling.hardware =")) from None


def checked(arguments: Arguments, world: int, device: Any) -> Config:
    """The configuration in a world of ranks. Raises ConfigError if it cannot run, whatever its files are."""
    from megalite.config.elastic import fit_layout
    from megalite.config.load import given, resolve
    from megalite.config.rules import check
    from megalite.training.dry_run import ABOUT_FILES

    # data in object stores is as unknown as that on the cluster's disks: no store is contacted
    values = given(arguments).values
    data = {option: values[option] for option in ("data.train", "data.validation") if option in values}
    absent = {option: json.dumps(_absent(value)) for option, value in data.items() if _absent(value) != value}
    config = resolve(
        replace(arguments, overrides=arguments.overrides | absent), world, weights=False, device=device
    )
    if config.parallel.min_ranks is not None:
        world = fit_layout(config, world, leave_out=ABOUT_FILES)
    check(config, world, leave_out=ABOUT_FILES)
    for option in absent:
        setattr(config.data, option.partition(".")[2], data[option])
    return config


def _absent(data: Any) -> Any:
    """A value of data.train or data.validation with paths in place of URLs, which are on no machine."""
    from megalite.stores.url import is_url

    if isinstance(data, dict):
        return {_absent(name): _absent(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_absent(name) for name in data]
    return f"./{data}" if isinstance(data, str) and is_url(data) else data


def check_fewer_nodes(job: ClusterJob, fewest: int | None, arguments: Arguments) -> None:
    """Raise ConfigError unless the run is valid on any number of nodes down to the fewest."""
    if fewest is None:
        return
    if fewest > job.nodes.count:
        raise ConfigError(f"--min_nodes {fewest} must be at most the number of nodes, {job.nodes.count}.")
    for count in range(fewest, job.nodes.count):
        try:
            checked(arguments, count * job.nodes.ranks, "cuda" if job.gpus else "cpu")
        except ConfigError as error:
            raise ConfigError(
                f"--min_nodes {fewest}: the run is not valid on {count} nodes: {error}"
            ) from None


def check_run_dir(job: ClusterJob, config: Config, why: str) -> None:
    """Raise ConfigError if the run's directory is on the nodes' own disks; note training data that is. What
    is in an object store needs no mount."""
    from megalite.config.extensions import is_source
    from megalite.config.streams import format_of, names_in
    from megalite.stores.url import is_url

    if not (is_url(config.run.dir) or any(mount.holds(config.run.dir) for mount in job.mounts)):
        raise ConfigError(
            f"run.dir = {config.run.dir} is not below the TARGET of a --mount, but {why}, and all nodes "
            "write their parts of checkpoints there. Mount a file system that all nodes share, for example "
            "--mount shared:/shared --run.dir /shared/runs, or set run.dir to the URL of an object store."
        )
    for name in names_in(config.data.train):
        path = name.removeprefix(f"{format_of(name)}:")
        if is_url(path) or "://" in path or is_source(name):
            continue
        if not any(mount.holds(path) for mount in job.mounts):
            print(f"Note: data.train = {name} is not below the TARGET of a --mount.", file=sys.stderr)


def with_files(job: ClusterJob, arguments: Arguments, directory: str) -> tuple[ClusterJob, dict[str, Path]]:
    """The job with its configuration files in a directory of the nodes, and name in it → file here. Shipped
    configurations are there already."""
    paths: dict[str, str] = {}
    files: dict[str, Path] = {}
    for each, path in own_files(arguments).items():
        name = re.sub(r"[^-._a-zA-Z0-9]", "-", path.name)  # as a ConfigMap may name it
        name = name if name not in files else f"{len(files) + 1}-{name}"
        files[name], paths[each] = path, f"{directory}/{name}"
    return with_paths(job, paths), files


def own_files(arguments: Arguments) -> dict[str, Path]:
    """Configuration files as they were given → paths here, without shipped ones."""
    from megalite.config.checkout import CONFIGS
    from megalite.config.files import config_file

    paths = {each: Path(config_file(each)) for each in arguments.files}
    return {each: path for each, path in paths.items() if path.parent != CONFIGS}


def with_paths(job: ClusterJob, paths: dict[str, str]) -> ClusterJob:
    """The job with other paths of its configuration files."""
    words = list(job.arguments)
    for place, word in enumerate(words):
        if word == "--config":
            words[place + 1] = paths.get(words[place + 1], words[place + 1])
        elif word.startswith("--config="):
            file = word.removeprefix("--config=")
            words[place] = f"--config={paths.get(file, file)}"
    return replace(job, arguments=tuple(words))


def name_of(name: str | None, config: Config) -> str:
    """The name of the job: --name, or the run's. Raises ConfigError if --name is not valid."""
    if name is None:
        return job_name(config.run.name)
    if job_name(name) != name:
        raise ConfigError(
            f"--name {name} is not a name of at most 40 lowercase letters, digits and dashes that starts "
            f"with a letter. Nearest: {job_name(name)}."
        )
    return name


def about(arguments: Arguments, config: Config, nodes: Nodes, command: Sequence[str]) -> tuple[str, ...]:
    """The lines at the beginning of the specification."""
    from megalite.config.dims import ParallelDims

    dims = ParallelDims.of(config, nodes.world)
    files = ", ".join(arguments.files) or "the command line"
    return (
        f"Made by: {' '.join(shlex.join(command).split())}",
        f"megalite {megalite.__version__}, configuration: {files}",
        f"tp {dims.tp} · pp {dims.pp} · cp {dims.cp} · dp {dims.dp} = {dims.world} ranks: {nodes}",
    )


def submission(on: str, file: Path, given: dict[str, Any]) -> list[str]:
    """The command that submits a specification."""
    address = ["--address", given["address"]] if "address" in given else []
    copied = copied_by_ray(file)
    return {
        "slurm": ["sbatch", str(file)],
        "kubernetes": ["kubectl", "apply", "-f", str(file)],
        "ray": [
            "ray",
            "job",
            "submit",
            "--no-wait",
            *address,
            "--working-dir",
            str(copied),
            "--",
            "python",
            str(file.resolve().relative_to(copied.resolve())),
        ],
        "skypilot": ["sky", "jobs", "launch", "--yes", "--detach-run", str(file)],
    }[on]


def submit(tool: Parser, command: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError:
        tool.error(
            f"--submit needs the program {command[0]}, which is not on this machine. Run this where it is: "
            f"{shlex.join(command)}"
        )
