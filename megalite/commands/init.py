"""Write a configuration for this machine, with the planner's layout and a comment on every option.

    megalite init                                                    ask for everything
    megalite init --from llama-3.2-1b --data data/corpus --output run.yaml
    megalite init --from org/name --weights --data data/chats        continue training or fine-tune
    megalite init --from llama-3-8b --gpus 64 --gpu h100             for other machines

The model is a preset, a configuration (.yaml, or shipped), a run, a checkpoint, or a Hugging Face directory
or org/name. A shape gets defaults by its size; a configuration keeps its options, and gets a layout. Nothing
is asked where stdin is no terminal.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megalite.commands.parser import Parser, as_name, as_new_file, as_tokens, positive, write_whole
from megalite.config.errors import ConfigError
from megalite.config.repository_id import is_repository_id
from megalite.config.schema import Config

if TYPE_CHECKING:
    from megalite.commands.models import NamedModel
    from megalite.planner.api import Device
    from megalite.planner.plans import Plan, RunRequest

Value = TypeVar("Value", str, int)
CPU_SHARE = 0.5
"""Fraction of the host's memory that a run on the CPU may plan with."""


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    options = tool.parse_args(argv)
    from megalite.planner.api import HardwareError

    try:
        check_output(options)
        complete(options)
        wanted, named = wanted_by(options)
        from megalite.planner.plans import first_config

        config, plan = first_config(wanted)
        write_whole(options.output, text_of(options, wanted, config, plan, named))
    except (ConfigError, HardwareError, OSError) as error:
        tool.error(error, options.output)
    report(options, wanted, config, plan)
    return 0


def parser() -> Parser:
    parser = Parser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--from",
        type=as_name,
        dest="source",
        metavar="MODEL",
        help="preset, configuration, run, checkpoint, Hugging Face directory or org/name",
    )
    add("--weights", action="store_true", help="start from the model's weights (default: random weights)")
    add(
        "--data",
        type=as_name,
        metavar="PREFIX",
        help="token file to train on, which may not exist yet (default: from the configuration, or "
        "data/train)",
    )
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs; 0: one process on the CPU (default: the GPUs of this machine)",
    )
    add("--gpu", type=as_name, metavar="NAME|FILE", help="kind of GPU, as for plan (default: this machine's)")
    add("--sequence_length", type=positive, metavar="S", help="tokens per sequence")
    add("--global_batch_size", type=positive, metavar="B", help="sequences per step")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--tokens",
        type=as_tokens,
        metavar="T",
        help="tokens to train on, for example 20B (default: one epoch of the data, or 20 per parameter)",
    )
    length.add_argument("--steps", type=positive, metavar="N", help="steps to train, instead of --tokens")
    add(
        "--output",
        type=as_new_file,
        default=Path("run.yaml"),
        metavar="FILE",
        help="output file (default run.yaml)",
    )
    add("--force", action="store_true", help="overwrite FILE if it exists")
    add("--json", action="store_true", help="print only one JSON object on stdout; do not prompt")
    return parser


def complete(options: argparse.Namespace) -> None:
    """Ask for missing options or use defaults. Raises ConfigError for options without a default."""
    from megalite.launch import machine

    asks = sys.stdin.isatty() and sys.stdout.isatty() and not options.json
    gpus = machine.gpus()
    if options.source is None:
        if not asks:
            raise ConfigError(
                "--from is required: a preset, a configuration, or a Hugging Face model, for example --from "
                "llama-3.2-1b."
            )
        from megalite.families.presets import presets

        print(f"Presets: {', '.join(presets())}; or a configuration, a Hugging Face directory, or org/name.")
        options.source = ask("Model", "llama-3.2-1b" if gpus else "tiny")
    if options.data is None and not has_data(options.source):
        options.data = (
            ask("Token file (PREFIX of prepare's --output)", "data/train") if asks else "data/train"
        )
    if options.gpus is None:
        options.gpus = ask("GPUs", len(gpus)) if asks else len(gpus)
    if options.gpus < 0:
        raise ConfigError(f"--gpus must be the number of GPUs, or 0 for the CPU, got {options.gpus}.")
    if options.gpu is None and options.gpus:
        options.gpu = kind_of_gpu(gpus[0].name if gpus else None, asks)


def has_data(source: str) -> bool:
    """Whether a model's name is that of a configuration that names its training data. Raises ConfigError for
    a name that is none."""
    from megalite.commands.models import options_in, shape_named

    named = shape_named(source, "--from")
    return named.kind == "configuration" and bool(options_in(named.name, "--from").get("data.train"))


def ask(question: str, default: Value) -> Value:
    from rich.prompt import IntPrompt, Prompt

    kind: Any = IntPrompt if isinstance(default, int) else Prompt
    return kind.ask(question, default=default)


def kind_of_gpu(name: str | None, asks: bool) -> str:
    """The planner's name of this machine's GPUs, else the user's answer. Raises ConfigError if nobody is
    asked."""
    from megalite.planner.api import find_device_by_driver_name, known_devices

    if name is not None and (known := find_device_by_driver_name(name)) is not None:
        return known.name
    if not asks:
        what = "this machine has no GPU" if name is None else f"the planner has no description of {name}"
        raise ConfigError(
            f"--gpu is required because {what}. Legal values: {', '.join(known_devices())}, or a device's "
            "FILE.yaml."
        )
    print(f"Kinds of GPUs: {', '.join(known_devices())}, or a device's FILE.yaml.")
    return ask("Kind of GPU", "h100")


def check_output(options: argparse.Namespace) -> None:
    output: Path = options.output
    if output.exists() and not options.force:
        raise ConfigError(
            f"--output {output} already exists. Choose another path or pass --force to overwrite it."
        )


def wanted_by(options: argparse.Namespace) -> tuple[RunRequest, NamedModel]:
    """Return what the options ask for. Raises ConfigError if the model cannot be read."""
    from megalite.commands.models import config_of, find_model, weights_of
    from megalite.planner.plans import RunRequest

    replacing = {
        "data.sequence_length": options.sequence_length,
        "train.global_batch_size": options.global_batch_size,
    }
    replacing |= {"data.train": options.data, "train.tokens": options.tokens, "train.steps": options.steps}
    device = device_of(options)
    auto = device.own_precision if options.gpus else None
    base = config_of(
        options.source, max(1, options.gpus), "--from", replacing=replacing, precision=None, auto=auto
    )
    named = find_model(options.source, "shape", "--from")
    assert named is not None, "config_of has found it"
    if named.kind == "checkpoint":
        base = Config(model=base.model)
    base.model.init_from = base.model.init_from if named.kind == "configuration" else None
    data = options.data or base.data.train or "data/train"
    lengths = (options.sequence_length, options.global_batch_size, options.tokens, options.steps)
    return RunRequest(
        base, named.kind == "configuration", options.gpus, device, options.output.stem, data,
        weights_of(options.source, "--from") if options.weights else None, *lengths,
    ), named  # fmt: skip


def device_of(options: argparse.Namespace) -> Device:
    from megalite.launch import machine
    from megalite.planner.api import find_device
    from megalite.planner.plans import cpu_device

    if options.gpus:
        return find_device(options.gpu)
    return cpu_device(machine.usable_cores(), CPU_SHARE * machine.memory_bytes())


def text_of(
    options: argparse.Namespace, wanted: RunRequest, config: Config, plan: Plan, named: NamedModel
) -> str:
    """Return the text of the file.

    A model on the Hub keeps its name, so that the file can be used on other machines.
    """
    from megalite.planner.plans import explanation, to_commented_yaml

    where = f"{wanted.gpus} × {wanted.device.name}" if wanted.gpus else "one process on the CPU"
    heading = f"{options.source} on {where}: {explanation.describe_layout(plan.choice)}.\n"
    if wanted.gpus:
        heading += (
            f"Predicted: {plan.step.total:.3g} s per step, {explanation.amount(plan.memory.total)} on the "
            "fullest rank.\n"
        )
    heading += (
        "Written by megalite init; a comment is the first sentence of `megalite train --help`.\n\n  "
        f"{start(options, wanted)}"
    )
    return to_commented_yaml(config, heading, names_of_hub(options, named))


def names_of_hub(options: argparse.Namespace, named: NamedModel) -> dict[str, str]:
    """Options that were given as a name of the Hub, and have become a directory of its cache → the name."""
    from megalite.commands.models import options_in

    if named.kind == "configuration":
        shape = options_in(named.name, "--from").get("model.from_hf")
        name = str(shape or "").removeprefix("hf:")
        return {"model.from_hf": name} if is_repository_id(name) else {}
    name = options.source.removeprefix("hf:")
    if named.kind != "huggingface" or name == named.name or Path(name).exists():
        return {}
    return {"model.from_hf": name} | ({"model.init_from": f"hf:{name}"} if options.weights else {})


def start(options: argparse.Namespace, wanted: RunRequest) -> str:
    """Return the command that starts the run."""
    from megalite.planner.plans import nodes_for

    file, node = shlex.quote(str(options.output)), wanted.device.per_node
    if wanted.gpus > node:
        nodes = nodes_for(wanted.gpus, node)
        rendezvous = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint NODE0:29500"
        return (
            f"torchrun {rendezvous} --nproc-per-node {wanted.gpus // nodes} -m megalite train --config {file}"
        )
    return f"megalite train {f'--nproc {wanted.gpus} ' if wanted.gpus > 1 else ''}--config {file}"


def report(options: argparse.Namespace, wanted: RunRequest, config: Config, plan: Plan) -> None:
    """Print what was written, and the next commands."""
    from megalite.config.token_files import prefixes, read_often, unused
    from megalite.planner.plans import PlannedJob, explanation

    steps: list[str] = []
    missing = [prefix for prefix in prefixes(config.data.train) if not Path(f"{prefix}.idx").is_file()]
    if missing:
        vocabulary = (
            f"--train_tokenizer {config.model.vocab_size}"
            if config.model.from_hf is None
            else f"--tokenizer {config.model.from_hf}"
        )
        steps += [
            f"megalite prepare --input 'corpus/*.txt' {vocabulary} --output {shlex.quote(prefix)}"
            for prefix in missing
        ]
    steps += [f"megalite train --config {shlex.quote(str(options.output))} --dry_run", start(options, wanted)]
    notes = unused(config) + read_often(config)
    if options.json:
        job = PlannedJob.of(config, wanted.device)
        print(
            json.dumps(
                {
                    "written": str(options.output),
                    "plan": explanation.plan_as_json(job, plan, {}),
                    "next": steps,
                    "notes": notes,
                }
            )
        )
        return
    tokens = config.train.global_batch_size * config.data.sequence_length
    length = (
        f"{config.train.steps:,} steps"
        if config.train.epochs is None
        else f"{config.train.epochs:g} epoch{'s' * (config.train.epochs != 1)} in steps"
    )
    layout = explanation.describe_layout(plan.choice)
    print(f"wrote {options.output}: {layout}; {length} of {tokens:,} tokens.")
    for line in notes:
        print(f"Note: {line}")
    print("Next:", *(f"  {line}" for line in steps), sep="\n")
