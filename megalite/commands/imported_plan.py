"""`megalite plan --from FILE`: the plan of another project's configuration.

Its layout as it is, on the GPUs that it is for, with the error of such predictions; then what to change, in
the names of the file and in ours; then what of the file the plan does not know.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from megalite.commands.import_config import as_yaml, name_of, read, read_linked
from megalite.commands.models import config_of
from megalite.config.errors import ConfigError
from megalite.config.recompute import shown
from megalite.config.rule import show
from megalite.config.schema import Config
from megalite.importers.convert import Imported, Remark, convert, leaves_of
from megalite.importers.projects import recognize
from megalite.importers.write_back import REMOVED, WriteBack, WrittenBack
from megalite.planner.api import Device, find_device
from megalite.planner.plans import (
    LayoutChoice,
    Plan,
    PlannedJob,
    Search,
    apply_layout,
    better,
    choice_of,
    differing,
    explanation,
    first_broken_rule,
    published_errors,
)
from megalite.system.progress import Report, silent

KEPT = (
    *("model.", "parallel.", "lora.", "train.", "optimizer.name", "muon.", "preference.", "distillation."),
    *("data.sequence_length", "data.packing", "data.reset_positions"),
)
"""Options that decide memory and time of a step."""
LEFT_OUT = (
    *("model.init_from", "lora.init_from", "train.steps", "train.tokens", "train.epochs", "train.stop_after"),
    *("train.early_", "train.rampup_"),
)
"""Of these, options that do not."""
AXES = ("tp", "pp", "cp")
LAYOUT = (
    *(
        "parallel.tp",
        "parallel.cp",
        "parallel.ep",
        "parallel.pp",
        "parallel.schedule",
        "parallel.virtual_stages",
    ),
    *("parallel.zero", "parallel.dp_shard", "parallel.sequence_parallel", "parallel.offload"),
    *(
        "parallel.offload_parameters",
        "parallel.context",
        "parallel.context_parts",
        "parallel.expert_dispatch",
    ),
    *("train.micro_batch_size", "train.recompute"),
)
"""Options of a layout, beside parallel.dp, which follows."""
FIXED = {
    **{"parallel.pp": "pp", "parallel.tp": "tp", "parallel.cp": "cp", "parallel.ep": "ep"},
    **{"parallel.schedule": "schedule", "parallel.offload": "offload", "parallel.zero": "zero"},
}
"""Option → the choice that the search keeps where the project has no key for it."""
NEIGHBOURS = 3  # to print, with one change
DIFFERENT = 0.01  # relative time below which a layout is not faster


class PlannedFile(NamedTuple):
    """An imported file.

    Attributes:
        convert: imports a changed content in the same way, for a number of data-parallel ranks.
        dp: data-parallel ranks that the plan assumes.
    """

    name: str
    project: str
    tree: Any
    imported: Imported
    convert: Callable[[Any, int], Imported]
    dp: int


@dataclass(frozen=True)
class Proposal:
    """A layout to change to.

    Attributes:
        ours: our options that change → their values.
        theirs: the same in keys of the file; None for a layout that the project cannot express.
    """

    plan: Plan
    changed: int
    ours: dict[str, Any]
    theirs: WrittenBack | None


def answer(options: argparse.Namespace, progress: Report = silent) -> tuple[dict[str, Any], str]:
    """Plan the file, and return the answer as JSON content and as text.

    Raises ConfigError if the file cannot be imported, or leaves open what a plan needs.
    """
    source = read_source(options)
    search, choice, own, broken = layout_of_file(source, options, progress)
    device, base = search.job.device, search.base
    progress("looking for better layouts")
    proposals, complete = propose(source, search, choice, own, options.plans, progress)
    error, sentence = published_errors.describe_error(search.job, choice)
    dropped = consequences(source.imported, base)
    content = {
        "file": source.name,
        "project": source.project,
        "gpu": device.name,
        "gpus": choice.gpus,
        "fits": own is not None and own.fits,
        "rejected": broken,
        "layout": None if own is None else explanation.plan_as_json(search.job, own, {}),
        "error": {"sentence": sentence, **({} if error is None else asdict(error))},
        "plans": [as_json(search.job, proposal) for proposal in proposals],
        "dropped": [{**remark._asdict(), "consequence": text} for remark, text in dropped],
        "complete": complete,
    }
    lines = [
        f"{source.name}, {source.imported.format}'s configuration, on {choice.gpus} × {device.name}:",
        *other_ranks(source),
        *describe(search, choice, own, broken),
        sentence,
        "",
        *described(search, choice, own, proposals),
        *([] if complete else ["The search was interrupted: only the plans found so far are shown."]),
    ]
    if dropped:
        lines += ["", "Not taken into account as the file says:"]
        lines += [f"  {remark.key} = {show(remark.value)}: {remark.why}. {text}" for remark, text in dropped]
    return content, "\n".join(lines)


def layout_of_file(
    source: PlannedFile, options: argparse.Namespace, progress: Report = silent
) -> tuple[Search, LayoutChoice, Plan | None, str | None]:
    """Return the search among layouts, and the file's own: its plan, or None and the rule that it breaks."""
    device = find_device(options.gpu)
    base = base_of(source, options, device)
    device.peak(base.train.precision)
    choice = choice_of(base)
    search = Search(PlannedJob.of(base, device), base, choice.gpus, progress=progress)
    broken = first_broken_rule(apply_layout(base, choice), choice.gpus)
    return search, choice, search.plan(choice) if broken is None else None, broken


def read_source(options: argparse.Namespace) -> PlannedFile:
    """Read and import the file for the number of GPUs of --gpus, or of the file."""
    file = options.source
    tree = read(file, options.project)
    linked = read_linked(tree, file)
    try:
        project = options.project or recognize(leaves_of(tree))
    except ConfigError as error:
        raise ConfigError(str(error).replace("before the file", "as --project")) from None
    imported = convert(tree, None, linked, project)
    if imported.is_empty:
        raise ConfigError(
            f"None of the keys in {name_of(file)} could be imported. Plan with --model instead of --from."
        )
    ranks = prod(imported.options.get(f"parallel.{axis}", 1) for axis in AXES)
    dp = imported.dp
    if options.gpus is not None:
        dp, rest = divmod(options.gpus, ranks)
        if rest or not dp:
            raise ConfigError(
                f"--gpus {options.gpus} must be a multiple of tp * pp * cp = {ranks} of {name_of(file)}. "
                "Pass a multiple, or change the sizes in the file."
            )
    if dp is None:
        raise ConfigError(f"{name_of(file)} does not say how many GPUs it is for. Pass --gpus N.")
    convert_for = partial(convert, linked=linked, project=project)
    return PlannedFile(name_of(file), project, tree, convert_for(tree, dp), convert_for, dp)


def base_of(source: PlannedFile, options: argparse.Namespace, device: Device) -> Config:
    """Return the file's configuration, with what the command line adds and replaces."""
    given = {
        option: value
        for option, value in source.imported.options.items()
        if option.startswith(KEPT) and not option.startswith(LEFT_OUT)
    }
    if options.model is not None:
        shape = asdict(config_of(options.model, 1).model)
        given = {option: value for option, value in given.items() if not option.startswith("model.")}
        given |= {f"model.{name}": value for name, value in shape.items() if value is not None}
    added = {
        "data.sequence_length": options.sequence_length,
        "train.global_batch_size": options.global_batch_size,
        "train.micro_batch_size": options.micro_batch_size,
        "model.vocab_size": options.vocab_size,
    }
    given |= {option: value for option, value in added.items() if value is not None}
    given.setdefault("train.micro_batch_size", 1)
    given |= {"parallel.dp": source.dp}
    check_given(source, given)
    ranks = source.dp * prod(given.get(f"parallel.{axis}", 1) for axis in AXES)
    with TemporaryDirectory() as directory:
        file = Path(directory) / "imported.yaml"
        file.write_text(as_yaml(replace(source.imported, options=given)), encoding="utf-8")
        try:
            config = config_of(str(file), ranks, precision=device.own_precision)
        except ConfigError as error:
            way_out = " Or pass --model NAME." if "model.from_hf" in str(error) else ""
            raise ConfigError(str(error).replace(str(file), source.name) + way_out) from None
    if config.model.vocab_size is None:
        raise ConfigError(f"{source.name} takes the vocabulary size from the data. Pass --vocab_size V.")
    return config


def check_given(source: PlannedFile, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if the file and the command line leave open what every plan needs."""
    missing = []
    if not given.keys() & {"model.preset", "model.from_hf", "model.hidden_size"}:
        missing.append("--model NAME, its model")
    if "data.sequence_length" not in given:
        missing.append("--sequence_length S, the tokens per sequence")
    if "train.global_batch_size" not in given:
        missing.append("--global_batch_size B, the sequences per step")
    if missing:
        raise ConfigError(f"{source.name} does not have all that a plan needs. Pass {' and '.join(missing)}.")


def propose(
    source: PlannedFile, search: Search, choice: LayoutChoice, own: Plan | None, wanted: int, progress: Report
) -> tuple[list[Proposal], bool]:
    """Return the layouts to change to, those with the fewest changes first; whether the search was completed.

    These are the best with one change, the fastest that the project has keys for, and the fastest of all.
    """
    back = WriteBack(source.tree, source.convert, source.project, source.dp)
    limit = own.step.total * (1 - DIFFERENT) if own is not None and own.fits else float("inf")
    candidates = {plan.choice: plan for plan in better(search, choice, own)[:NEIGHBOURS]}
    fixed = {name: getattr(choice, name) for option, name in FIXED.items() if option not in back.expressible}
    complete = True
    for mode in dict.fromkeys((choice.recompute, "none", "full")):
        theirs = replace(search, fixed={**fixed, "recompute": mode}, wanted=wanted)
        plans, whole = theirs.until_interrupted()
        complete = complete and whole
        candidates |= {plan.choice: plan for plan in plans}
    kept = sorted(
        without_idle_recomputation(plan for plan in candidates.values() if plan.step.total < limit),
        key=lambda plan: (differing(plan.choice, choice), plan.step.total),
    )
    fastest = sorted(kept, key=lambda plan: plan.step.total)[:wanted]
    near = [plan for plan in kept if differing(plan.choice, choice) == 1][:NEIGHBOURS]
    proposals = [
        _proposal(source, search, choice, plan, back) for plan in kept if plan in near or plan in fastest
    ]
    if complete:
        progress("looking for the fastest layout of megalite")
        ours, complete = replace(search, fixed={}, wanted=1).until_interrupted()
        best = min((plan.step.total for plan in kept), default=limit)
        if ours and ours[0].step.total < best * (1 - DIFFERENT):
            proposals.append(_proposal(source, search, choice, ours[0], None))
    return proposals, complete


def without_idle_recomputation(plans: Iterable[Plan]) -> list[Plan]:
    """Return plans without those that differ from a faster one only in what they recompute."""
    kept: dict[LayoutChoice, Plan] = {}
    for plan in plans:
        key = replace(plan.choice, recompute="")
        if key not in kept or plan.step.total < kept[key].step.total:
            kept[key] = plan
    return list(kept.values())


def _proposal(
    source: PlannedFile, search: Search, choice: LayoutChoice, plan: Plan, back: WriteBack | None
) -> Proposal:
    before, after = (layout_of(apply_layout(search.base, each)) for each in (choice, plan.choice))
    ours = {option: value for option, value in after.items() if before[option] != value}
    if plan.choice.dp != choice.dp:
        ours["parallel.dp"] = plan.choice.dp
    changed = differing(plan.choice, choice)
    if back is None:
        return Proposal(plan, changed, ours, None)
    batch = source.imported.options.get("train.global_batch_size")
    wanted = after | {"parallel.dp": plan.choice.dp}
    wanted |= {} if batch is None else {"train.global_batch_size": batch}
    # what the file does not say as the plan assumes it stays as it is
    start = back.start_values(wanted)
    wanted = {option: value for option, value in wanted.items() if option in ours or start[option] == value}
    return Proposal(plan, changed, ours, back.changes(wanted))


def layout_of(config: Config) -> dict[str, Any]:
    """Return the options of a configuration's layout."""
    return {option: _value(config, option) for option in LAYOUT} | {
        "train.recompute": shown(config.train.recompute)
    }


def describe(search: Search, choice: LayoutChoice, own: Plan | None, broken: str | None) -> list[str]:
    """Say whether the file's layout fits, where its memory goes, and how long a step takes."""
    room = search.job.device.memory
    head = f"Its layout: {explanation.describe_layout(choice)}."
    if own is None:
        return [head, f"A run rejects it: {broken}"]
    verdict = "It fits" if own.fits else "It does not fit"
    parts = own.step.parts().items()
    shares = sorted(((value / own.step.total, name) for name, value in parts), reverse=True)
    spent = [f"{explanation.PARTS[name]} {share:.1%}" for share, name in shares if share >= 0.005]
    palm, causal = search.job.mfu(choice, own.step.total)
    speed = search.job.tokens_per_second_per_gpu(choice, own.step.total)
    return [
        head,
        f"{verdict}: the fullest rank takes {explanation.amount(own.memory.total)} of "
        f"{explanation.amount(room)}, of which {explanation.amount(search.room)} are usable: "
        f"{explanation.memory_parts(own)}.",
        f"A step takes {own.step.total:.4g} s, {speed:,.0f} tokens/s per GPU, MFU {palm:.1%} "
        f"({causal:.1%} causal): {', '.join(spent)}.",
    ]


def other_ranks(source: PlannedFile) -> list[str]:
    """Say if the file is for another number of GPUs, which --gpus replaces."""
    if source.imported.dp in (None, source.dp):
        return []
    return [f"The file has {source.imported.dp} data-parallel ranks; here it has {source.dp}."]


def described(search: Search, choice: LayoutChoice, own: Plan | None, proposals: list[Proposal]) -> list[str]:
    """Return the table of the proposed layouts, and the changes that each needs."""
    if not proposals:
        if own is not None and own.fits:
            return ["No layout of these GPUs is predicted to be faster by 1 % or more."]
        return [explanation.nothing_fits(search)]
    fits = own is not None and own.fits
    lines = [
        f"{'Faster' if fits else 'Layouts that fit'}, those with the fewest changes first:",
        "",
        explanation.table([explanation.row(search.job, proposal.plan) for proposal in proposals]),
    ]
    for number, proposal in enumerate(proposals, 1):
        ours = ", ".join(f"{option}: {show(value)}" for option, value in proposal.ours.items())
        gain = f", {own.step.total / proposal.plan.step.total - 1:.0%} faster" if fits and own else ""
        lines += [
            "",
            f"{number}. {explanation.describe_layout(proposal.plan.choice)}{gain}",
            f"   megalite: {ours}",
        ]
        lines += [f"   {line}" for line in in_the_file(proposal.theirs)]
    return lines


def in_the_file(theirs: WrittenBack | None) -> list[str]:
    """Say which keys of the file change."""
    if theirs is None:
        return ["in the file: no keys for it, a layout of megalite"]
    changes = [
        f"remove {key}" if value is REMOVED else f"{key} = {show(value)}"
        for key, value in theirs.keys.items()
    ]
    lines = [f"in the file: {', '.join(changes)}"] if changes else []
    if theirs.unexpressed:
        lines.append(f"in the file, no key found for: {', '.join(theirs.unexpressed)}")
    return lines


def consequences(imported: Imported, base: Config) -> list[tuple[Remark, str]]:
    """Return the keys that are not honoured as the file says, and what that means for the plan."""
    return [
        (remark, consequence(imported, remark, base))
        for remark in imported.remarks
        if remark.kind in ("lost", "approximate", "open")
    ]


def consequence(imported: Imported, remark: Remark, base: Config) -> str:
    """Say what the plan assumes for a key, or that it does not depend on it."""
    option = imported.corresponding.get(remark.key)
    if option is None:
        if remark.kind == "lost":
            return (
                "The plan is without it: its figures differ if it changes the model, the batch or the layout."
            )
        options = imported.honoured.get(remark.key, [])
        return _assumed([each for each in options if each.startswith(KEPT)], base)
    return _assumed([option] if option.startswith(KEPT) and not option.startswith(LEFT_OUT) else [], base)


def _assumed(options: list[str], base: Config) -> str:
    values = [f"{option}: {show(_value(base, option))}" for option in options]
    return f"The plan assumes {', '.join(values)}." if values else "The plan does not depend on it."


def _value(base: Config, option: str) -> Any:
    section, _, name = option.partition(".")
    return getattr(getattr(base, section), name)


def as_json(job: PlannedJob, proposal: Proposal) -> dict[str, Any]:
    """Return a proposal as plain data."""
    theirs = proposal.theirs
    return {
        **explanation.plan_as_json(job, proposal.plan, {}),
        "changes": proposal.ours,
        "in_file": None if theirs is None else theirs.keys,
        "without_key": None if theirs is None else theirs.unexpressed,
    }
