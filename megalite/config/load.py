"""YAML and command line → Config: default < files in their order < command line; sources.py says what a
preset replaces.

jsonargparse checks and converts the values. Unknown keys, broken files and wrong types end the process with
one message that names all. jsonargparse and yaml are imported on first use: code that only uses a Config does
not need them.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn

from megalite.config import amounts, migrations, run_files, run_length
from megalite.config.arguments import Arguments, read_arguments
from megalite.config.dims import filling_dp
from megalite.config.errors import ConfigError
from megalite.config.extensions import load_extensions
from megalite.config.files import config_file, is_of_run, read_tree, shipped_configs
from megalite.config.help import help_text
from megalite.config.repository_id import OF_HUB
from megalite.config.rule import Mistakes, show
from megalite.config.rules import check
from megalite.config.schema import OPTIONS, SECTIONS, Config
from megalite.config.sections.preference import SCORES
from megalite.config.sources import Given, OptionSource, combined
from megalite.config.streams import FORMATS
from megalite.config.token_files import fit_vocabulary
from megalite.config.values import nest, parse_all, takes, without_brackets
from megalite.families.presets import preset

if TYPE_CHECKING:
    from megalite.config.precision import Device, PrecisionChoice


DERIVED = (
    *(
        "parallel.dp",
        "model.vocab_size",
        "train.steps",
        "train.tokens",
        "train.epochs",
        "optimizer.warmup_steps",
        "train.precision",
    ),
    "lora.modules_to_save",
)
"""Options whose values may follow from others, from the data or from the device."""


NOTHING_GIVEN = f"""Say what to train, for example
  megalite train --config quickstart --data.train PREFIX   (a small model; megalite prepare makes PREFIX)
  megalite train --config run.yaml                         (megalite init writes run.yaml for this machine)
--list_configs lists the configurations shipped with megalite, --help [SECTION] the options:
{", ".join(SECTIONS)}."""


WAIT_FOR_LOCAL_RANK_0 = 5.0
"""Seconds that the other local ranks wait before they exit: torchrun stops all ranks as soon as one exits,
and local rank 0 must print."""


@dataclass(frozen=True)
class Loaded:
    """A resolved configuration.

    Attributes:
        origins: section.key → where the value is from, for options that are not at their default.
        choice: what train.precision = auto has become; None if the precision was given.
        advice: lines about former names of options in files and on the command line.
    """

    config: Config
    origins: dict[str, str]
    choice: "PrecisionChoice | None"
    advice: list[str]


def load_config(
    argv: list[str] | None = None, *, world_size: int, own: Sequence[str] = (), advise: bool = True
) -> Config:
    """The checked configuration of a run, from a command line (by default this process's).

    Exits the process without a traceback if there is nothing to run: with status 2 and one message on stderr
    for a wrong configuration, with status 0 after --help, --list_configs or --print_config.

    Args:
        world_size: number of processes.
        own: names of the caller's own options, for messages about misspelled ones.
        advise: print a line on stderr for each former name of an option.
    """
    return load(argv, world_size=world_size, own=own, advise=advise).config


def load(
    argv: list[str] | None = None, *, world_size: int, own: Sequence[str] = (), advise: bool = True
) -> Loaded:
    """`load_config` with where the values are from."""
    try:
        arguments = read_arguments(sys.argv[1:] if argv is None else argv, own)
        if arguments == Arguments():
            exit_with(NOTHING_GIVEN)
        if arguments.help:
            Mistakes(arguments.mistakes).report()
            exit_with(help_text(arguments.section), status=0)
        if arguments.list_configs:
            exit_with("\n".join(f"{name:18} {what}" for name, what in shipped_configs().items()), status=0)
        loaded = resolved(arguments, world_size, weights=not arguments.print_config)
        if advise:
            print_advice(loaded.advice)
        if arguments.print_config and _is_local_rank_0():
            print(to_yaml(loaded.config, loaded.origins), end="", flush=True)
        if loaded.config.parallel.min_ranks is not None:
            from megalite.config.elastic import fit_layout

            world_size = fit_layout(loaded.config, world_size)
        check(loaded.config, world_size)
    except ConfigError as error:
        exit_with(str(error))
    if arguments.print_config:
        raise SystemExit(0)
    return loaded


def exit_with(message: str, status: int = 2) -> NoReturn:
    """Exit with a status; only local rank 0 prints the message, to stderr for a status other than 0."""
    if _is_local_rank_0():
        print(message.rstrip("\n"), file=sys.stderr if status else sys.stdout, flush=True)
        if status:
            tell_torchrun(message)
    elif status:
        # local rank 0 fails for all: torchrun's report need not list every rank
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(WAIT_FOR_LOCAL_RANK_0)
    raise SystemExit(status)


def tell_torchrun(message: str, **known: Any) -> None:
    """Let torchrun's report, which is the last thing on the screen, end with a message instead of a hint at a
    traceback.

    The format is that of torch.distributed.elastic.multiprocessing.errors.

    Args:
        known: further data for a launcher of ours.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time())), "written": time.time(), **known}
        content = {"message": {"message": message.rstrip("\n"), "extraInfo": extra}}
        with suppress(OSError):
            Path(file).write_text(json.dumps(content), encoding="utf-8")


def print_advice(lines: Sequence[str]) -> None:
    """Print lines on stderr of local rank 0, each once per process."""
    for line in lines if _is_local_rank_0() else ():
        _print_once(line)


@cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _is_local_rank_0() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Section → key → value, as plain data for JSON and YAML."""
    return {
        name: {key: amounts.share_text(value) for key, value in section.items() if f"{name}.{key}" in OPTIONS}
        for name, section in asdict(config).items()
    }


def from_dict(tree: dict[str, Any]) -> Config:
    """The inverse of to_dict; sections and keys may be missing. Values are not checked. Raises ConfigError on
    an unknown key."""
    sections = nest(flatten(tree, "in the configuration"))
    types: dict[str, Any] = {section.name: section.type for section in fields(Config)}
    return Config(**{name: section(**sections.get(name, {})) for name, section in types.items()})


def to_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The configuration as YAML, from which `--config` reads the same configuration.

    Args:
        origins: section.key → where the value is from, written as a comment beside it; an option that is not
            listed has its default.
    """
    import yaml

    def dumped(tree: Any) -> str:
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=140)

    if origins is None:
        return dumped(to_dict(config))
    lines: list[str] = []
    for section, values in to_dict(config).items():
        lines.append(f"{section}:")
        for key, value in values.items():
            comment = f"# {' '.join(origins.get(f'{section}.{key}', 'default').split())}"
            first, *others = dumped({key: value}).splitlines()
            # a text of several lines, inside which a comment would be a part of it
            if others and not first.endswith(":"):
                lines += [f"  {line}" for line in (comment, first, *others)]
            else:
                lines += [f"  {first:38}  {comment}", *(f"  {line}" for line in others)]
    return "\n".join(lines) + "\n"


def write_config(config: Config, run_dir: Path) -> None:
    """Store the resolved configuration in the run's directory; a budget of memory as it was given, since it
    depends on the layout."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if config.train.memory_budget is not None:
        config = replace(config, train=replace(config.train, recompute="budget"))
    (run_dir / run_files.CONFIG).write_text(to_yaml(config), encoding="utf-8")


def flatten(tree: Any, source: str) -> dict[str, Any]:
    """{section: {key: value}} → {section.key: value}, with present names in place of former ones. Raises
    ConfigError that names all but known options; `source` says where it was."""
    mistakes = Mistakes()
    options = _known(tree, source, mistakes, [])
    mistakes.report()
    return options


def _known(tree: Any, source: str, mistakes: Mistakes, advice: list[str]) -> dict[str, Any]:
    """The known options in a tree by their present names; the others are mistakes."""

    def unknown(name: str) -> None:
        from megalite.config import suggestions

        mistakes.add(*suggestions.unknown(name, source, SECTIONS).messages)

    if not isinstance(tree, dict):
        mistakes.add(
            f"{show(tree)} {source} is not a set of sections. Write `section:`, and below it, indented, "
            "`key: value`."
        )
        return {}
    options: dict[str, Any] = {}
    for section, content in tree.items():
        if section in OPTIONS:
            piece = str(section).replace(".", ":` and, indented below it, `")
            mistakes.add(f"{section} {source} is written in one piece. Write `{piece}:`.")
        elif section not in SECTIONS:
            unknown(str(section))
        elif not isinstance(content, (dict, NoneType)):
            mistakes.add(f"{section} = {show(content)} {source} is not a section. {_below(section, content)}")
        else:
            for key, value in (content or {}).items():
                if f"{section}.{key}" in OPTIONS or f"{section}.{key}" in migrations.NAMES:
                    options[f"{section}.{key}"] = value
                else:
                    unknown(f"{section}.{key}")
    return _migrated(options, source, mistakes, advice)


def _migrated(
    options: Mapping[str, Any], source: str, mistakes: Mistakes, advice: list[str]
) -> dict[str, Any]:
    """`migrations.migrated`; no options if they are mistaken."""
    present: dict[str, Any] = {}
    with mistakes.collected():
        present = migrations.migrated(options, source, advice)
    return present


def _below(section: str, content: Any) -> str:
    """The way out for a section that has a value of its own."""
    if section == "fp16" and isinstance(content, bool):  # which other programs have as a switch
        return (
            "Its keys are those of the loss scale; for fp16 itself write, below `train:`, `precision: fp16`."
        )
    return "Write its keys below it, indented, as `key: value`."


def resolve(
    arguments: Arguments, world_size: int, *, weights: bool = True, device: "Device | None" = None
) -> Config:
    """The given options on top of the defaults derived from them (preset, from_hf, dp, vocabulary size,
    steps); not checked yet.

    Models of the Hugging Face Hub are fetched and become directories.

    Args:
        world_size: number of processes.
        weights: fetch also those of model.init_from.
        device: what train.precision = auto is chosen for. None: the device of this machine.

    Raises:
        ConfigError: with all mistakes of the files and of the command line.
    """
    loaded = resolved(arguments, world_size, weights=weights, device=device)
    print_advice(loaded.advice)
    return loaded.config


def resolved(
    arguments: Arguments, world_size: int, *, weights: bool = True, device: "Device | None" = None
) -> Loaded:
    """`resolve` with where the values are from."""
    merged = given(arguments)
    values = merged.values
    values |= {
        option: with_home(value) for option, value in values.items() if OPTIONS[option].metadata.get("path")
    }
    load_extensions(values.get("run.extensions"))  # options may name what these register
    if any(values.get(option) for option in OF_HUB):
        from megalite.families.hub import with_directories

        values |= with_directories(values, weights=weights)
    if any(
        option in values for option in ("lora.targets", "lora.ranks", "lora.alphas", "lora.modules_to_save")
    ):
        from megalite.families.peft_names import with_own_names

        values |= with_own_names(values)
    shape = _shape(values.get("model.preset"), values.get("model.from_hf"))
    config = from_dict(nest(shape | values))
    if weights and config.run.url is not None:
        from megalite.stores.arrival import fetch_run

        fetch_run(config.run.url, config.run.directory)  # what it resumes from, and with which precision
    before = {option: attrgetter(option)(config) for option in DERIVED}
    if config.parallel.dp is None:
        config.parallel.dp = filling_dp(config.parallel, world_size)
    fit_vocabulary(config, fixed="model.vocab_size" in values)
    run_length.resolve_steps(config)
    choice = None
    if config.train.precision == "auto":
        from megalite.config.precision import chosen

        choice = chosen(config, device)
        config.train.precision = choice.precision  # type: ignore[assignment]
    return Loaded(config, _origins(merged, shape, before, config, choice), choice, merged.advice)


def given(arguments: Arguments) -> Given:
    """What files and command line say, converted to the options' types. Raises ConfigError with all mistakes
    in them."""
    mistakes, sources, advice = Mistakes(arguments.mistakes), list[OptionSource](), list[str]()
    for each in arguments.files:
        with mistakes.collected():
            path = config_file(each)
            # a run's stored configuration is not to be edited
            values = _file_values(path, mistakes, [] if is_of_run(path) else advice)
            sources.append(OptionSource(each, f"in {path}", values))
    where = "on the command line"
    overrides = _migrated(arguments.overrides, where, mistakes, advice)
    sources.append(OptionSource("command line", where, parse_all(overrides, where, mistakes, words=True)))
    merged = Given()
    with mistakes.collected():
        merged = combined(sources)
    if (name := merged.values.get("model.preset")) is not None:
        with mistakes.collected():
            preset(name)
    mistakes.report()
    merged.advice = advice
    return merged


def _origins(
    merged: Given,
    shape: Mapping[str, Any],
    before: Mapping[str, Any],
    config: Config,
    choice: "PrecisionChoice | None",
) -> dict[str, str]:
    """section.key → where its value is from.

    Args:
        before: those of DERIVED, as files, command line and shape gave them.
    """
    values, said = merged.values, {option: source.name for option, source in merged.origins.items()}
    which = "preset" if values.get("model.preset") is not None else "from_hf"
    reasons = {
        "parallel.dp": "the number of ranks",
        "model.vocab_size": "data.train",
        "optimizer.warmup_steps": "in steps",
    }
    reasons["lora.modules_to_save"] = "model.resize_embeddings"
    if choice is not None:
        reasons["train.precision"] = f"auto: {choice.reason}"
    for length in ("train.tokens", "train.epochs"):
        if values.get(length) is not None:
            said["train.steps"] = said[length]
            reasons |= {"train.steps": f"{length} = {show(values[length])}", length: "in steps"}
    origins = dict.fromkeys(shape, f"{which} {values.get(f'model.{which}')}") | said
    for option in DERIVED:
        if attrgetter(option)(config) != before[option]:
            origins[option] = f"{origins[option]}, {reasons[option]}" if option in said else reasons[option]
    return origins


def _file_values(path: str, mistakes: Mistakes, advice: list[str]) -> dict[str, Any]:
    """The options in a YAML file; text where a list is expected is a list without brackets. Raises
    ConfigError if it cannot be read."""
    tree = read_tree(path, "--config")
    values = {} if tree is None else _known(tree, f"in {path}", mistakes, advice)
    lists = {
        option
        for option, value in values.items()
        if isinstance(value, str) and takes(list, option) and not takes(str, option)
    }
    words = {option: without_brackets(option, [values[option]]) for option in lists}
    others = {option: value for option, value in values.items() if option not in lists}
    return parse_all(others, f"in {path}", mistakes) | parse_all(words, f"in {path}", mistakes, words=True)


def with_home(value: Any) -> Any:
    """A path, hf:PATH, scores:PATH, FORMAT:PATH of a stream, or a list or mapping of paths, with ~ replaced
    by the home directory."""
    if isinstance(value, str):
        schemes = ("hf:", SCORES, *(f"{name}:" for name in FORMATS))
        scheme = next((each for each in schemes if value.startswith(each)), "")
        return scheme + os.path.expanduser(value.removeprefix(scheme))
    if isinstance(value, list):
        return [with_home(each) for each in value]
    return (
        {with_home(key): with_home(each) for key, each in value.items()} if isinstance(value, dict) else value
    )


def _shape(name: str | None, directory: str | None) -> dict[str, Any]:
    """The model options of a preset or a Hugging Face directory (a rule refuses both at once)."""
    shape: dict[str, Any] = {}
    if name is not None:
        shape = preset(name)
    elif directory is not None:
        from megalite.families.model_config import hf_shape

        shape = hf_shape(directory)
    return {f"model.{key}": value for key, value in shape.items()}
