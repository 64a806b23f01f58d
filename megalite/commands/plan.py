"""Find the best layout of a model on a number of GPUs: memory and step time of every legal layout, and an
explanation of the best.

    megalite plan --model llama-3-70b --gpus 512 --gpu h100 --sequence_length 8192 --global_batch_size 1024
        [--explain]
    megalite plan --model config.json --gpus 8 --gpu a100 … --tp 2 --schedule zb-v    some choices fixed
    megalite plan … --tokens 15e12 --price_per_hour 2.5 --write run.yaml    days, dollars, a configuration
    megalite plan --from train.sh --gpu h100    another project's configuration: does it fit, what to change
    megalite plan --calibrate here.yaml    measure this machine; then --gpu here.yaml

Ctrl-C ends the search and prints the plans found so far, which are the fastest; the exit status is then 130.
Memory is from `megalite.planner.api.estimate`, bubbles are from the simulator; docs/planner.md describes
the model and its measured accuracy.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from megalite.commands.parser import (
    Parser,
    as_name,
    as_new_file,
    as_tokens,
    positive,
    progress_of,
    write_whole,
)
from megalite.config.errors import ConfigError
from megalite.config.recompute import BUDGET
from megalite.config.schema import Config
from megalite.config.sections.parallel import ContextMethod
from megalite.importers.projects import PROJECTS
from megalite.launch.exit_status import ExitStatus
from megalite.model.kinds import dispatch_of
from megalite.parallel.pipeline.generator import SCHEDULES
from megalite.parallel.quantized.layout import FORMS
from megalite.planner.api import Device, HardwareError, find_device, known_devices
from megalite.planner.plans import (
    Plan,
    PlannedJob,
    Search,
    apply_layout,
    explanation,
    first_broken_rule,
    fp8_effect,
    nodes_for,
    to_run_config,
    to_yaml,
    zero2_hint,
)
from megalite.system.progress import Report, silent

FIXED = (
    *(
        "tp",
        "cp",
        "context",
        "context_parts",
        "ep",
        "expert_dispatch",
        "pp",
        "dp",
        "dp_shard",
        "zero",
        "micro_batch_size",
    ),
    *("virtual_stages", "recompute", "schedule", "offload"),
)
NEEDED = ("model", "gpus", "gpu", "sequence_length", "global_batch_size")
WITHOUT_SOURCE = (
    *FIXED,
    *("precision", "fp8", "lora_rank", "lora_base", "tokens", "price_per_hour", "write"),
)
"""Options that --from does not have, since the file decides them; but for the micro-batch size."""
DAY = 86_400


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    try:
        if options.calibrate:
            tool.enter_checkout("--calibrate")
            print(calibrate(options.calibrate))
            return
        if options.source:
            given = [name for name in WITHOUT_SOURCE if getattr(options, name) and name != "micro_batch_size"]
            if given or options.explain:
                named = ", ".join(f"--{name}" for name in given or ["explain"])
                tool.error(f"{named} cannot be combined with --from. Change FILE, or plan with --model.")
        if options.source is None and options.project is not None:
            tool.error("--project names the project of --from FILE. Pass both, or remove it.")
        needed = ("gpu",) if options.source else NEEDED
        missing = [name for name in needed if getattr(options, name) is None]
        if missing:
            check_model(options)
            tool.error(
                f"{', '.join(f'--{name}' for name in missing)} {'is' if len(missing) == 1 else 'are'} "
                "required."
            )
        with progress_of(options.json) as progress:
            content, text = _answer_of(options)(options, progress)
    except (ConfigError, HardwareError, OSError) as error:
        tool.error(error, options.write)
    print(json.dumps(content) if options.json else text)
    if not content["complete"]:
        raise SystemExit(ExitStatus.INTERRUPTED)
    if not content["plans"] and not content.get("fits"):
        raise SystemExit(1)


def _answer_of(options: argparse.Namespace) -> Callable[..., tuple[dict[str, Any], str]]:
    if not options.source:
        return answer
    from megalite.commands import imported_plan

    return imported_plan.answer


def parser() -> Parser:
    parser = Parser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--model",
        type=as_name,
        metavar="NAME|FILE",
        help="a preset, a configuration (.yaml, or one that is shipped), a run, a checkpoint, a "
        "config.json, or a Hugging Face directory or org/name",
    )
    add(
        "--from",
        dest="source",
        type=as_name,
        metavar="FILE",
        help="plan another project's configuration, a file or a command in quotes as for import-config; "
        "--model, --sequence_length, --global_batch_size, --micro_batch_size and --vocab_size replace values",
    )
    add("--project", choices=PROJECTS, metavar="PROJECT", help="the project of --from (default: recognized)")
    add("--gpus", type=positive, metavar="N", help="number of devices; every plan uses all of them")
    add(
        "--gpu",
        type=as_name,
        metavar="NAME|FILE",
        help=f"{', '.join(known_devices())}, or a device file (YAML) written by --calibrate",
    )
    add("--sequence_length", type=positive, metavar="S", help="tokens per sequence")
    add("--global_batch_size", type=positive, metavar="B", help="sequences per step")
    add(
        "--vocab_size",
        type=positive,
        metavar="V",
        help="vocabulary size, if the configuration takes it from the data",
    )
    add(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        help="compute precision (default: the configuration's, or bf16 if the device has it)",
    )
    add(
        "--fp8",
        choices=("none", "block", "mxfp8"),
        help="multiply the matrices of layers in fp8, as train.fp8 (default: the configuration's)",
    )
    add("--lora_rank", type=positive, metavar="R", help="train adapters of this rank, as lora.rank")
    add(
        "--lora_base",
        choices=("none", *FORMS),
        help="form of the frozen matrices under adapters, as lora.base (default: the configuration's)",
    )
    add(
        "--lora_double_quant",
        action="store_true",
        help="quantize scales of 4 bits, as lora.double_quant",
    )
    for name in ("tp", "cp", "ep", "pp", "dp", "micro_batch_size", "virtual_stages"):
        add(f"--{name}", type=positive, metavar="N", help="fix this choice")
    add(
        "--context",
        choices=get_args(ContextMethod),
        help="fix how attention communicates, with cp > 1",
    )
    add(
        "--context_parts",
        choices=("zigzag", "balanced"),
        help="fix how rows are split over ranks, with context gather, ring or auto",
    )
    add(
        "--expert_dispatch",
        choices=("all_to_all", "all_gather"),
        help="fix how tokens reach their experts, with ep > 1",
    )
    add("--zero", type=int, choices=(0, 1, 2, 3), help="fix the ZeRO stage")
    add(
        "--dp_shard",
        type=positive,
        metavar="N",
        help="fix the number of data-parallel ranks over which ZeRO shards",
    )
    add(
        "--recompute",
        metavar="MODE",
        help="fix the recomputation: none, selective, full, every-K or budget (default)",
    )
    add("--schedule", choices=SCHEDULES, help="fix the pipeline schedule")
    add("--offload", choices=("none", "cpu", "disk"), help="fix the device of the optimizer state")
    add("--plans", type=positive, default=10, metavar="N", help="number of plans to print (default 10)")
    add(
        "--tokens",
        type=as_tokens,
        metavar="T",
        help="tokens to train on, for example 300B or 15e12; adds training time and cost",
    )
    add(
        "--price_per_hour",
        type=amount,
        metavar="P",
        help="US dollars per device hour (default: from the hardware table)",
    )
    add("--write", type=as_new_file, metavar="FILE", help="write the best plan as a run's configuration")
    add(
        "--explain",
        action="store_true",
        help="show memory and step time of this model from one GPU up to ZeRO-3 with offload",
    )
    add(
        "--calibrate",
        type=as_new_file,
        metavar="FILE",
        help="measure this machine and write a device file for --gpu",
    )
    add("--json", action="store_true", help="print only one JSON object on stdout")
    return parser


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def calibrate(path: Path) -> str:
    """Measure this machine, and write a device file."""
    from benchmarks import plan, report

    try:
        plan.write_device(path, plan.calibrate())
    except report.BenchmarkError as error:
        raise HardwareError(f"--calibrate: {error}") from None
    return f"wrote {path}. Run megalite benchmark plan to measure the prediction error on this machine."


def check_model(options: argparse.Namespace) -> None:
    """Raise ConfigError if the given model does not exist."""
    from megalite.commands.models import config_of

    if options.model is not None:
        config_of(options.model, options.gpus or 1)


def base_config(options: argparse.Namespace) -> Config:
    """The configuration that all plans share: the model, the batch, and everything else from a configuration
    file; the precision is the device's own if neither the options nor the configuration says another."""
    from megalite.commands.models import config_of

    sizes = {
        "data.sequence_length": options.sequence_length,
        "train.global_batch_size": options.global_batch_size,
    }
    config = config_of(
        options.model, options.gpus or 1, replacing=sizes, precision=find_device(options.gpu).own_precision
    )
    if options.vocab_size is not None:
        config.model.vocab_size = options.vocab_size
    if config.model.vocab_size is None:
        raise ConfigError(
            f"--model {options.model} takes the vocabulary size from the data, which does not exist. Pass "
            "--vocab_size N."
        )
    data = replace(config.data, sequence_length=options.sequence_length)
    train = replace(
        config.train,
        global_batch_size=options.global_batch_size,
        precision=options.precision or config.train.precision,
        fp8=options.fp8 or config.train.fp8,
    )
    lora = replace(
        config.lora,
        rank=options.lora_rank or config.lora.rank,
        base=options.lora_base or config.lora.base,
        double_quant=options.lora_double_quant or config.lora.double_quant,
    )
    return replace(config, data=data, train=train, lora=lora)


def answer(options: argparse.Namespace, progress: Report = silent) -> tuple[dict[str, Any], str]:
    """Search, write the --write file, and return the answer as JSON content and as text."""
    base, device = base_config(options), find_device(options.gpu)
    device.peak(base.train.precision)
    check_alone(base, options.recompute)
    job = PlannedJob.of(base, device)
    fixed = {name: getattr(options, name) for name in FIXED if getattr(options, name) is not None}
    search = Search(job, base, options.gpus, fixed, options.plans, progress=progress)
    plans, complete = search.until_interrupted()
    progress("explaining")
    walked = explanation.walk(search) if options.explain and complete else []
    content: dict[str, Any] = {
        "parameters": parameters(base),
        "gpu": device.name,
        "gpus": options.gpus,
        "plans": [],
    }
    content |= {"active_parameters": active(base)} if dispatch_of(base.model) else {}
    content |= {"considered": search.considered, "simulated": search.timed, "complete": complete}
    if not plans and not complete:
        message = "Search interrupted before any plan was found."
        return {**content, "explanation": [message]}, message
    if not plans:
        if not search.considered:
            raise ConfigError(f"No layout is legal: {explanation.illegal(search)}")
        message = explanation.nothing_fits(search)
        return {**content, "explanation": [message, *walked]}, "\n".join([*walked, message])
    if options.write:
        chosen = to_run_config(base, plans[0].choice, search.room)
        hardware = options.gpu if device.name == options.gpu.lower() else str(Path(options.gpu).absolute())
        # the run compares itself with the plan
        chosen = replace(chosen, profiling=replace(chosen.profiling, hardware=hardware))
        write_whole(options.write, to_yaml(chosen, heading(search, plans[0], options.write)))
    costs = [cost(job, plan, device, options) for plan in plans]
    between = zero2_hint(apply_layout(base, plans[0].choice), options.gpus, device.per_node)
    sentences = [*explanation.winner(search, plans), *fp8_effect(job, plans[0].choice)]
    sentences += [] if between is None else [f"{between}."]
    if not complete:
        sentences.append(f"Search interrupted: only the fastest {len(plans)} plans are shown.")
    content["plans"] = [
        explanation.plan_as_json(job, plan, its) for plan, its in zip(plans, costs, strict=True)
    ]
    content["explanation"] = [*sentences, *walked]
    return content, text(search, plans, costs[0], [*sentences, *([""] if walked else []), *walked])


def check_alone(base: Config, recompute: str | None) -> None:
    """Raise ConfigError for errors that no layout can avoid: in the model, the sequence length or the
    recomputation mode."""
    config = deepcopy(base)
    config.parallel = replace(
        config.parallel, tp=1, pp=1, dp=1, cp=1, ep=1, dp_shard=None, virtual_stages=None, schedule="1f1b"
    )
    config.train.micro_batch_size, config.train.recompute = 1, recompute or "none"
    config.train.memory_budget = 1.0 if recompute == BUDGET else None
    if (message := first_broken_rule(config, 1)) is not None:
        raise ConfigError(message)


def parameters(config: Config) -> int:
    from megalite.model.parameters import model_specs
    from megalite.parallel.spec import parameter_count

    return parameter_count(model_specs(config.model))


def active(config: Config) -> int:
    from megalite.model.parameters import active_parameters

    return active_parameters(config.model)


def cost(job: PlannedJob, plan: Plan, device: Device, options: argparse.Namespace) -> dict[str, float | None]:
    """Return the days and dollars for --tokens."""
    if options.tokens is None:
        return {}
    seconds = options.tokens / (job.global_batch_size * job.sequence_length) * plan.step.total
    price = options.price_per_hour or device.price
    return {
        "days": seconds / DAY,
        "cost": None if price is None else seconds / 3600 * price * plan.choice.gpus,
    }


def text(search: Search, plans: list[Plan], cost: dict[str, float | None], sentences: list[str]) -> str:
    job = search.job
    per_token = f" ({active(search.base):,} active per token)" if dispatch_of(job.model) else ""
    head = (
        f"{parameters(search.base):,} parameters{per_token} on {search.gpus} × {job.device.name}; "
        f"{search.considered:,} legal layouts, "
        f"{search.timed} simulated"
    )
    lines = [head, "", explanation.table([explanation.row(job, plan) for plan in plans]), "", *sentences]
    if cost:
        dollars = "" if cost["cost"] is None else f", ${cost['cost']:,.0f}"
        lines.append(f"Training takes {cost['days']:,.1f} days{dollars}.")
    return "\n".join(lines)


def heading(search: Search, plan: Plan, path: Path) -> str:
    """Return the heading of the written file."""
    job = search.job
    nodes = nodes_for(search.gpus, job.device.per_node)
    start = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint NODE0:29500 " if nodes > 1 else ""
    return (
        f"{explanation.describe_layout(plan.choice)}, for {search.gpus} × {job.device.name}\n"
        f"Predicted: {plan.step.total:.4g} s per step, {explanation.amount(plan.memory.total)} on the "
        "fullest "
        "rank.\n\n"
        f"  torchrun {start}--nproc-per-node {search.gpus // nodes} -m megalite train --config {path} "
        "--data.train PREFIX --train.steps N"
    )
