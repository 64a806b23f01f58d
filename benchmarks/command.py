"""Measure speed and memory on this machine, and write the results to benchmarks/results/.

    step [--precision fp32 bf16] [--compile]    a 25M Llama (on a GPU 1B) against transformers
    kernels [GROUP ...] [--tune]                Triton kernels on a GPU against torch and Liger
    host [--widths 64] [--batches 1]            the host's part of a step against transformers
    overhead                                    small models against their matmuls alone
    peers [NAME ...] [--rounds 10]              ratios to nanoGPT, DDP, torchtitan, picotron …
    comm                                        data parallelism on 4 ranks against torch
    checkpoint                                  saving on 4 ranks against torch.save
    copies                                      copies in memory on 4 ranks, against checkpoints
    scaling [--worlds 1,2,4] [--layout tp2xdp]  strong and weak scaling, here or under torchrun
    plan                                        five layouts against the planner's predictions
    prepare [--megabytes N] [--workers N]       preparation against Megatron-LM and datatrove
    context                                     memory and steps of context parallelism
    bubble                                      bubble of each schedule against the simulator

Do not use the machine in the meantime: compared runs alternate within one invocation, but other load adds
noise to all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import (
    bubble,
    checkpoint,
    comm,
    context,
    gpu_step,
    host,
    kernels,
    memory_copies,
    overhead,
    peers,
    plan,
    prepare,
    report,
    scaling,
    step,
)
from megalite.commands.parser import Parser, as_output, positive
from megalite.config.errors import ConfigError
from megalite.config.load import exit_with

ON_CPU = {
    "host": host,
    "overhead": overhead,
    "comm": comm,
    "checkpoint": checkpoint,
    "copies": memory_copies,
    "plan": plan,
    "bubble": bubble,
    "peers": peers,
    "context": context,
}
COLUMNS = {"step": step.COLUMNS} | {name: benchmark.COLUMNS for name, benchmark in ON_CPU.items()}
COLUMNS["prepare"] = prepare.COLUMNS
TARGETS = {"target": "target", "measured": "measured:.2f", "wanted": "wanted", "met": "met"}
KERNEL_TARGETS = {"kernel": "kernel", "shape": "shape", **TARGETS}


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    for name in ("rounds", "threads"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            tool.error(f"--{name} must be at least 1, got {getattr(options, name)}.")
    if options.machine is not None and not re.fullmatch(r"[\w.-]+", options.machine):
        tool.error(
            f"--machine {options.machine} is not a valid part of a file name. Use only letters, "
            "digits, dots and dashes."
        )
    if options.output.exists() and not options.output.is_dir():
        tool.error(
            f"--output {options.output} is not a directory. Choose another path, or leave it "
            f"unset to use {report.RESULTS.relative_to(report.ROOT)}."
        )
    if options.benchmark == "kernels":
        check_kernels(tool, options)
    if options.benchmark == "peers" and (
        unknown := [name for name in options.peers if name not in peers.PEERS]
    ):
        tool.error(f"Unknown peer: {unknown[0]}. Choose from: {', '.join(peers.PEERS)}.")
    try:
        path = scale(options) if options.benchmark == "scaling" else measure(options)
    except ConfigError as error:
        exit_with(f"{tool.prog}: {error}")
    except (report.BenchmarkError, OSError) as error:
        tool.exit(1, f"{tool.prog}: {error}\n")
    if os.environ.get("RANK", "0") == "0":
        show(path, options.json)


def check_kernels(tool: Parser, options: argparse.Namespace) -> None:
    options.groups = list(dict.fromkeys(options.groups)) or list(kernels.GROUPS)
    unknown = [group for group in options.groups if group not in kernels.GROUPS]
    if unknown:
        tool.error(f"Unknown kernel group: {unknown[0]}. Choose from: {', '.join(kernels.GROUPS)}.")
    if report.gpu() is None and not options.smoke:
        tool.error(
            "The kernel benchmarks require an NVIDIA GPU, but none was found. Run them on a "
            "machine with one, or see docs/kernels.md for the existing results."
        )


def parser() -> Parser:
    top = Parser(description=__doc__)
    common = Parser(add_help=False)
    common.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="rounds in which compared runs alternate (default 3; on a GPU one)",
    )
    common.add_argument(
        "--output",
        type=as_output,
        default=report.RESULTS,
        metavar="DIR",
        help="directory of the JSON (default benchmarks/results)",
    )
    common.add_argument(
        "--machine",
        metavar="NAME",
        help="the machine's name in the file name (default: its GPU or processor)",
    )
    common.add_argument("--json", action="store_true", help="print only the JSON on stdout")
    # tiny sizes with meaningless figures, for tests
    common.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    commands = top.add_subparsers(
        dest="benchmark",
        required=True,
        metavar="step|kernels|host|overhead|peers|comm|checkpoint|copies|scaling|plan|prepare|bubble|context",
    )
    threads = Parser(add_help=False)
    threads.add_argument("--threads", type=int, default=2, help="threads of single-process runs (default 2)")
    of_step = commands.add_parser(
        "step", parents=[common, threads], help="a training step against transformers, side by side"
    )
    of_step.add_argument(
        "--precision",
        nargs="+",
        choices=["fp32", "bf16"],
        default=["fp32", "bf16"],
        help="(default both; on a GPU always bf16)",
    )
    of_step.add_argument(
        "--compile",
        action="store_true",
        help="also with torch.compile, both sides (on a GPU transformers always)",
    )
    of_kernels = commands.add_parser(
        "kernels", parents=[common, threads], help="every Triton kernel on a GPU, against torch and Liger"
    )
    of_kernels.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"{', '.join(kernels.GROUPS)} (default all)"
    )
    of_kernels.add_argument(
        "--tune", action="store_true", help="measure other settings of the static tables instead"
    )
    add_host(
        commands.add_parser(
            "host", parents=[common], help="the host's part of a step of small models, against transformers"
        )
    )
    commands.add_parser(
        "overhead",
        parents=[common, threads],
        help="small models on several layouts, against their matrix products alone",
    )
    of_peers = commands.add_parser(
        "peers", parents=[common, threads], help="ratios to other programs at equal settings"
    )
    of_peers.add_argument("peers", nargs="*", metavar="NAME", help=f"{', '.join(peers.PEERS)} (default all)")
    commands.add_parser(
        "comm",
        parents=[common, threads],
        help="data-parallel steps on four ranks against torch's DDP and FSDP2",
    )
    commands.add_parser(
        "checkpoint",
        parents=[common, threads],
        help="saving on four ranks against torch.save, at once and in the background",
    )
    commands.add_parser(
        "copies",
        parents=[common, threads],
        help="copies of the state in memory on four ranks, against checkpoints on the disk",
    )
    add_scaling(
        commands.add_parser(
            "scaling", parents=[common], help="strong and weak scaling over worlds of several sizes"
        )
    )
    commands.add_parser(
        "plan",
        parents=[common, threads],
        help="steps of a small model on five layouts, against the planner's predictions",
    )
    of_prepare = commands.add_parser(
        "prepare", parents=[common, threads], help="data preparation beside Megatron-LM's and datatrove's"
    )
    of_prepare.add_argument(
        "--megabytes", type=positive, default=1000, metavar="N", help="size of the text (default 1000)"
    )
    of_prepare.add_argument(
        "--workers", type=positive, metavar="N", help="processes of each (default: the usable cores)"
    )
    commands.add_parser(
        "context",
        parents=[common, threads],
        help="context parallelism on four ranks: memory, steps, and the ring's hops",
    )
    commands.add_parser(
        "bubble",
        parents=[common, threads],
        help="sleeping stages on four ranks under every pipeline schedule",
    )
    return top


def add_scaling(commands: argparse.ArgumentParser) -> None:
    add = commands.add_argument
    add(
        "--worlds",
        type=numbers,
        default=[1, 2],
        metavar="N,…",
        help="numbers of ranks; under torchrun all that are compared (default 1,2)",
    )
    add(
        "--layout",
        default="dp",
        metavar="AXES",
        help="the axis that grows with the ranks, and others of fixed size: dp, tp, pp, tp2xdp (default dp)",
    )
    add("--preset", metavar="NAME", help="preset of the model (default: a 25M Llama)")
    add(
        "--sequence_length",
        type=positive,
        metavar="N",
        help="tokens per row (default 256, or the model's maximum if smaller)",
    )
    add(
        "--global_batch_size",
        type=positive,
        metavar="N",
        help="rows per step in the largest world (default 4 microbatches per rank)",
    )
    add("--micro_batch_size", type=positive, default=1, metavar="N", help="rows per microbatch (default 1)")
    add(
        "--threads",
        type=int,
        metavar="N",
        help="threads per rank (default: this machine's cores over the largest world)",
    )


def add_host(commands: argparse.ArgumentParser) -> None:
    add = commands.add_argument
    add(
        "--widths",
        type=width,
        nargs="+",
        default=list(host.WIDTHS),
        metavar="N",
        help=f"hidden sizes (default {' '.join(map(str, host.WIDTHS))})",
    )
    add(
        "--batches",
        type=positive,
        nargs="+",
        default=list(host.BATCHES),
        metavar="N",
        help=f"rows of {host.LENGTH} tokens (default {' '.join(map(str, host.BATCHES))})",
    )
    add("--threads", type=int, default=1, help="threads of each process (default 1)")


def width(text: str) -> int:
    """Return a hidden size that whole heads of an even number of channels fill."""
    size = positive(text)
    if size % (8 if size < 512 else 64):
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 8, or of 64 from 512 on")
    return size


def numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def scale(options: argparse.Namespace) -> Path:
    """Measure scaling.

    Rank 0 writes the figures and, if matplotlib is installed, a plot.
    """
    sizes = {
        "length": options.sequence_length,
        "batch": options.global_batch_size,
        "micro": options.micro_batch_size,
    }
    planned = scaling.plan(
        options.layout,
        options.worlds,
        name=options.preset,
        **sizes,
        threads=options.threads,
        smoke=options.smoke,
    )
    first, name = os.environ.get("RANK", "0") == "0", f"scaling-{planned.layout}"
    machine = options.machine or report.default_name(report.gpu() if planned.device == "cuda" else None)
    where = report.path_of(name, options.output, machine)
    earlier = json.loads(where.read_text(encoding="utf-8")) if where.exists() else None
    content = scaling.compare(
        planned,
        earlier,
        rounds=options.rounds,
        smoke=options.smoke,
        progress=say if first else lambda line: None,
    )
    if not first:
        return where
    path = report.write(name, content, options.output, machine)
    if find_spec("matplotlib") is not None:
        scaling.draw(content, path.with_suffix(".svg"))
    return path


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> Path:
    """Run the selected benchmark, and write its results."""
    name = "tuning" if options.benchmark == "kernels" and options.tune else options.benchmark

    def save(content: dict[str, Any]) -> Path:
        return report.write(name, content, options.output, options.machine)

    on_gpu: dict[str, Any] = {"smoke": options.smoke, "save": save, "progress": say}
    gpu = None if options.smoke else report.gpu()
    if options.benchmark == "kernels":
        written = report.path_of(name, options.output, options.machine or report.slug(gpu or "smoke"))
        return kernels.compare(options.groups, tune=options.tune, kept=kernels.earlier(written), **on_gpu)
    if options.benchmark == "step" and gpu is not None:
        return gpu_step.compare(threads=options.threads, compiled=options.compile, **on_gpu)
    common: dict[str, Any] = {
        "rounds": options.rounds,
        "threads": options.threads,
        "smoke": options.smoke,
        "progress": say,
    }
    if options.benchmark == "step":
        return save(
            step.compare(
                **common, precisions=list(dict.fromkeys(options.precision)), compiled=options.compile
            )
        )
    if options.benchmark == "prepare":
        del common["threads"]
        return save(prepare.compare(**common, megabytes=options.megabytes, workers=options.workers))
    if options.benchmark == "host":
        common |= {name: list(dict.fromkeys(getattr(options, name))) for name in ("widths", "batches")}
    if options.benchmark == "peers":
        common["peers"] = list(dict.fromkeys(options.peers or peers.PEERS))
    return save(ON_CPU[options.benchmark].compare(**common))


def show(path: Path, as_json: bool) -> None:
    text = path.read_text(encoding="utf-8")
    if as_json:
        print(text, end="")
        return
    content = json.loads(text)
    rows, columns = lines(content)
    print(report.table(rows, columns))
    if content["targets"]:
        judged = [{**row, "met": "yes" if row["met"] else "no"} for row in content["targets"]]
        print("\n" + report.table(judged, KERNEL_TARGETS if "kernel" in judged[0] else TARGETS))
    if "convention" in content:
        print(f"\n{content['convention']}")
    if content.get("layer"):
        layer = report.table([host.shown_layer(row) for row in content["layer"]], host.LAYER_COLUMNS)
        print(f"\n{layer}\n\n{host.LAYER_CONVENTION}")
    where = (
        content.get("device", {}).get("name")
        or f"{content['machine']['cpu']}, {content['machine']['cores']} cores"
    )
    print(f"\n{where}: {path}")


def lines(content: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the rows and columns of the table."""
    name = content["benchmark"]
    if name == "kernels":
        return [kernels.shown(row) for row in content["results"]], kernels.COLUMNS
    if name == "host":
        return [host.shown(row) for row in content["results"]], host.COLUMNS
    if name == "tuning":
        return content["results"], kernels.TUNED_COLUMNS
    if name.startswith("scaling"):
        return content["results"], scaling.COLUMNS
    return content["results"], gpu_step.COLUMNS if "device" in content else COLUMNS[name]
