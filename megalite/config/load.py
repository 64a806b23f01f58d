"""YAML and command line → Config: default < files in their order < command line; sources.py says what a
preset replaces.

jsonargparse checks and converts the values. Unknown keys, broken files and wrong types end the process with
one message that names all. jsonargparse and yaml are imported on first use: code that only uses a Config does
not need them.
"""

import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from fractions import Fraction
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from megalite.config import amounts
from megalite.config.checkout import CONFIGS
from megalite.config.dims import filling_dp
from megalite.config.rule import Mistakes, show, suggestion
from megalite.config.rules import check
from megalite.config.schema import OPTIONS, SECTIONS, SHORT, Config, ConfigError
from megalite.config.sources import Given, OptionSource, combined
from megalite.config.token_files import fit_vocabulary
from megalite.families.presets import preset, presets

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from megalite.config.precision import Device, PrecisionChoice

USAGE = (
    "megalite train [--nproc N] --config FILE.yaml|NAME [--tp N --pp N --dp N --cp N --ep N --zero N] "
    "[--section.key VALUE ...], "
    "or: torchrun --nproc-per-node N -m megalite train --config ..."
)
LAUNCH = {
    "nproc": "Start N ranks on this machine; gpu: one for each GPU. Without it this process is the only one, "
    "or one of torchrun's.",
    "nnodes": "Number of nodes (default 1), each of which runs this command with the same --nproc.",
    "node_rank": "Place of this node, from 0. Default: the nodes' order of arrival.",
    "rdzv_endpoint": "HOST:PORT where several nodes meet: an address of the first one, and a free port "
    "there.",
    "max_restarts": "Start all ranks again up to K times after one has failed (default 0).",
}
"""What `megalite.commands.launch` takes, which is no part of the configuration → help."""
DRY_RUN = ("world_size", "ranks", "device")
"""Options of `megalite train --dry_run` alone."""
PATHS = (
    "run.dir",
    "model.from_hf",
    "model.init_from",
    "data.train",
    "data.validation",
    "parallel.offload_dir",
    "checkpoint.load",
    "lora.init_from",
    "logging.tensorboard",
    "profiling.hardware",
)
"""Options that name files, in which ~ is the home directory."""
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
    """

    config: Config
    origins: dict[str, str]
    choice: "PrecisionChoice | None"


def load_config(argv: list[str] | None = None, *, world_size: int, own: Sequence[str] = ()) -> Config:
    """The checked configuration of a run, from a command line (by default this process's).

    Exits the process without a traceback if there is nothing to run: with status 2 and one message on stderr
    for a wrong configuration, with status 0 after --help, --list_configs or --print_config.

    Args:
        world_size: number of processes.
        own: names of the caller's own options, for messages about misspelled ones.
    """
    return load(argv, world_size=world_size, own=own).config


def load(argv: list[str] | None = None, *, world_size: int, own: Sequence[str] = ()) -> Loaded:
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
        if arguments.print_config and _is_local_rank_0():
            print(to_yaml(loaded.config, loaded.origins), end="", flush=True)
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

    The format is that of torch.distributed.elastic.multiprocessing.errors. known: further data for a launcher
    of ours.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time())), "written": time.time(), **known}
        content = {"message": {"message": message.rstrip("\n"), "extraInfo": extra}}
        with suppress(OSError):
            Path(file).write_text(json.dumps(content), encoding="utf-8")


def _is_local_rank_0() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


# --- Config ↔ dict ↔ YAML
# ----------------------------------------------------------------------------------------------------


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
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")


def flatten(tree: Any, source: str) -> dict[str, Any]:
    """{section: {key: value}} → {section.key: value}. Raises ConfigError that names all but known options;
    `source` says where it was."""
    mistakes = Mistakes()
    options = _known(tree, source, mistakes)
    mistakes.report()
    return options


def _known(tree: Any, source: str, mistakes: Mistakes) -> dict[str, Any]:
    """The known options in a tree; the others are mistakes."""

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
                if f"{section}.{key}" in OPTIONS:
                    options[f"{section}.{key}"] = value
                else:
                    unknown(f"{section}.{key}")
    return options


def _below(section: str, content: Any) -> str:
    """The way out for a section that has a value of its own."""
    if section == "fp16" and isinstance(content, bool):  # which other programs have as a switch
        return (
            "Its keys are those of the loss scale; for fp16 itself write, below `train:`, `precision: fp16`."
        )
    return "Write its keys below it, indented, as `key: value`."


# --- reading
# ------------------------------------------------------------------------------------------------------------


@dataclass
class Arguments:
    """The parsed command line. mistakes: messages about words that could not be read, which `resolve` reports
    with all others."""

    files: list[str] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)
    help: bool = False
    section: str | None = None  # the only one to explain
    print_config: bool = False
    list_configs: bool = False
    mistakes: list[str] = field(default_factory=list)


def read_arguments(argv: list[str], own: Sequence[str] = ()) -> Arguments:
    """Parse `--name VALUE` and `--name=VALUE`. A word that is not an option, or an option without a value, is
    one of the mistakes.

    Args:
        own: names of other options that the command takes itself, for messages about misspelled ones.
    """
    arguments, words = Arguments(), deque(argv)
    while words:
        word = words.popleft()
        if word in ("-h", "--help"):
            arguments.help = True
            if words and not words[0].startswith("-"):
                arguments.section = _section(words.popleft(), arguments.mistakes)
        elif word == "--print_config":
            arguments.print_config = True
        elif word == "--list_configs":
            arguments.list_configs = True
        elif not word.startswith("--"):
            arguments.mistakes.append(f"{word} on the command line belongs to no option. {_as_option(word)}")
            if word.startswith("-") and words and not words[0].startswith("-"):
                words.popleft()  # its value
        else:
            _read_option(word, words, arguments, own)
    return arguments


def _read_option(word: str, words: deque[str], arguments: Arguments, own: Sequence[str]) -> None:
    """Read an option, and take its value from the words that follow it."""
    name, equals, value = word.removeprefix("--").partition("=")
    option = SHORT.get(name, name)
    if option != "config" and option not in OPTIONS:
        arguments.mistakes += _not_here(name, own).messages
        while not equals and words and not words[0].startswith("--"):  # its value
            words.popleft()
        return
    if not equals and (not words or words[0].startswith("--")):
        example = "true" if option in OPTIONS and OPTIONS[option].type is bool else "VALUE"
        arguments.mistakes.append(f"--{name} on the command line has no value. Write --{name} {example}.")
        return
    following = value if equals else words.popleft()
    if option == "config":
        arguments.files.append(following)
    else:
        arguments.overrides[option] = without_brackets(option, [following, *_more_entries(option, words)])


def _section(word: str, mistakes: list[str]) -> str | None:
    """The section that --help is asked about: its name, or an option in it."""
    section = SHORT.get(word, word).partition(".")[0]
    if section in SECTIONS and (section == word or SHORT.get(word, word) in OPTIONS):
        return section
    mistakes.append(
        f"--help {word}: there is no such section.{suggestion(section, SECTIONS)} Sections: "
        f"{', '.join(SECTIONS)}."
    )
    return None


def _as_option(word: str) -> str:
    """What a word without dashes was likely meant to be: a configuration, or an option."""
    if os.path.isfile(word) or Path(word).suffix in (".yaml", ".yml"):
        return f"Write --config {word}."
    name, equals, value = word.lstrip("-").partition("=")
    if name in OPTIONS or name in SHORT:
        return f"Write --{name} {value if equals else 'VALUE'}."
    if near := get_close_matches(word, shipped_configs(), n=1):
        return f"Write --config {near[0]}."
    return "Write --section.key VALUE."


def _not_here(name: str, own: Sequence[str]) -> ConfigError:
    """The error for a name on the command line that is no option of a run."""
    if name in DRY_RUN and name not in own:
        return ConfigError(f"--{name} on the command line is for a dry run. Add --dry_run, or leave it out.")
    if name in LAUNCH:  # `megalite train` takes them itself
        return ConfigError(
            f"--{name} on the command line is for starting the ranks of a run. Leave it out: a dry run "
            "starts none and takes their number "
            "by --world_size, and verify starts those that --tp, --pp, --dp and --cp need."
        )
    from megalite.config.suggestions import unknown

    known = [*SHORT, *own, *LAUNCH, "config", "list_configs", "print_config", "help"]
    return unknown(name, "on the command line", known, dashes="--")


def _more_entries(option: str, words: deque[str]) -> Iterator[str]:
    """Take the words that follow a list's first one and belong to it, up to the next option."""
    while takes(list, option) and words and not words[0].startswith("-"):
        yield words.popleft()


def takes(kind: type, option: str) -> bool:
    """Whether values of a kind, list or str, are among those that an option's type lists."""
    hint = OPTIONS[option].type
    return any(
        kind in (each, get_origin(each))
        for each in (hint, *(get_args(hint) if get_origin(hint) is not list else ()))
    )


def without_brackets(option: str, words: list[str]) -> str:
    """The words of an option's value as one; a list may be written as `a b` or `a,b`."""
    if not takes(list, option) or words[0][:1] in "[{" or words == ["null"]:
        return " ".join(words)
    if takes(str, option):  # a path may hold a comma
        return words[0] if len(words) == 1 else f"[{', '.join(words)}]"
    return f"[{', '.join(part.strip() for word in words for part in word.split(',') if part.strip())}]"


def read_tree(path: str, option: str) -> Any:
    """The content of a YAML file; option: the option that names it, for messages. Raises ConfigError if it
    cannot be read."""
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"), path, option)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{option} = {path} can not be read: {reason}. {_nearest_file(path)}") from None


def parse_yaml(text: str, path: str, option: str) -> Any:
    """The content of a YAML text. Raises ConfigError if it is none; path, option: where it is from, for
    messages."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads 3e-4 as a number and refuses duplicate keys: YAML 1.1 reads it as text and silently keeps the
        last of equal keys."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key} appears twice", node.start_mark
                    )
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
    )
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        if problem.startswith("but "):  # the half of a sentence
            problem = f"{getattr(error, 'context', '')}, {problem}"
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{option} = {path} is not valid YAML: {problem}{where}. Correct the file there."
        ) from None


def shipped_configs() -> dict[str, str]:
    """The configurations shipped with megalite: name → first sentence of the file's comment."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in CONFIGS.glob("*.yaml")}
    return {name: _first_sentence(found[name]) for name in sorted(found)}


def _first_sentence(text: str) -> str:
    comment = takewhile(lambda line: line.startswith("# "), text.splitlines())
    return " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].rstrip(".") + "."


def config_file(given: str) -> str:
    """The path of `--config`: a file or, if there is none of that name, a configuration shipped with
    megalite."""
    given = os.path.expanduser(given)
    if Path(given).is_file() or Path(given).name != given or Path(given).suffix in (".yaml", ".yml"):
        return given
    shipped = CONFIGS / f"{given}.yaml"
    if not shipped.is_file():
        if given in presets():
            raise ConfigError(
                f"--config = {given} is a preset, which is the shape of a model alone. Give it with "
                f"--model.preset {given}."
            )
        near = suggestion(given, shipped_configs()) or " megalite train --list_configs lists those."
        raise ConfigError(
            f"--config = {given} is neither a file nor a configuration that comes with megalite.{near}"
        )
    return str(shipped)


def _nearest_file(path: str) -> str:
    others = {
        other.stem: str(other)
        for end in ("*.yaml", "*.yml")
        for other in sorted(Path(path).parent.glob(end))
        if other.is_file()
    }
    near = get_close_matches(Path(path).stem, others, n=1)
    return (
        f"Nearest: {others[near[0]]}."
        if near
        else "Give the path of a YAML file, or a name of megalite train --list_configs."
    )


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
    return resolved(arguments, world_size, weights=weights, device=device).config


def resolved(
    arguments: Arguments, world_size: int, *, weights: bool = True, device: "Device | None" = None
) -> Loaded:
    """`resolve` with where the values are from."""
    found = given(arguments)
    values = found.values
    values |= {option: with_home(values[option]) for option in PATHS if option in values}
    if values.get("model.init_from") or values.get("model.from_hf"):
        from megalite.families.hub import with_directories

        values |= with_directories(values, weights=weights)
    if any(
        option in values for option in ("lora.targets", "lora.ranks", "lora.alphas", "lora.modules_to_save")
    ):
        from megalite.families.peft_names import with_own_names

        values |= with_own_names(values)
    shape = _shape(values.get("model.preset"), values.get("model.from_hf"))
    config = from_dict(nest(shape | values))
    before = {option: attrgetter(option)(config) for option in DERIVED}
    if config.parallel.dp is None:
        config.parallel.dp = filling_dp(config.parallel, world_size)
    fit_vocabulary(config, fixed="model.vocab_size" in values)
    amounts.resolve_steps(config)
    choice = None
    if config.train.precision == "auto":
        from megalite.config.precision import chosen

        choice = chosen(config, device)
        config.train.precision = choice.precision  # type: ignore[assignment]
    return Loaded(config, _origins(found, shape, before, config, choice), choice)


def given(arguments: Arguments) -> Given:
    """What files and command line say, converted to the options' types. Raises ConfigError with all mistakes
    in them."""
    mistakes, sources = Mistakes(arguments.mistakes), list[OptionSource]()
    for each in arguments.files:
        with mistakes.collected():
            path = config_file(each)
            sources.append(OptionSource(each, f"in {path}", _file_values(path, mistakes)))
    values = parse_all(arguments.overrides, "on the command line", mistakes, words=True)
    sources.append(OptionSource("command line", "on the command line", values))
    found = Given()
    with mistakes.collected():
        found = combined(sources)
    if (name := found.values.get("model.preset")) is not None:
        with mistakes.collected():
            preset(name)
    mistakes.report()
    return found


def _origins(
    found: Given,
    shape: Mapping[str, Any],
    before: Mapping[str, Any],
    config: Config,
    choice: "PrecisionChoice | None",
) -> dict[str, str]:
    """section.key → where its value is from. before: those of DERIVED, as files, command line and shape gave
    them."""
    values, said = found.values, {option: source.name for option, source in found.origins.items()}
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


def _file_values(path: str, mistakes: Mistakes) -> dict[str, Any]:
    """The options in a YAML file; text where a list is expected is a list without brackets. Raises
    ConfigError if it cannot be read."""
    tree = read_tree(path, "--config")
    values = {} if tree is None else _known(tree, f"in {path}", mistakes)
    lists = {
        option
        for option, value in values.items()
        if isinstance(value, str) and takes(list, option) and not takes(str, option)
    }
    words = {option: without_brackets(option, [values[option]]) for option in lists}
    others = {option: value for option, value in values.items() if option not in lists}
    return parse_all(others, f"in {path}", mistakes) | parse_all(words, f"in {path}", mistakes, words=True)


def with_home(value: Any) -> Any:
    """A path, hf:PATH, or a list or mapping of paths, with ~ replaced by the home directory."""
    if isinstance(value, str):
        scheme = "hf:" if value.startswith("hf:") else ""
        return scheme + os.path.expanduser(value.removeprefix(scheme))
    if isinstance(value, list):
        return [with_home(each) for each in value]
    return (
        {with_home(key): with_home(each) for key, each in value.items()} if isinstance(value, dict) else value
    )


def nest(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{section.key: value} → {section: {key: value}}."""
    tree: dict[str, dict[str, Any]] = {}
    for option, value in options.items():
        section, key = option.split(".")
        tree.setdefault(section, {})[key] = value
    return tree


def _shape(name: str | None, directory: str | None) -> dict[str, Any]:
    """The model options of a preset or a Hugging Face directory (a rule refuses both at once)."""
    shape: dict[str, Any] = {}
    if name is not None:
        shape = preset(name)
    elif directory is not None:
        from megalite.families.model_config import hf_shape

        shape = hf_shape(directory)
    return {f"model.{key}": value for key, value in shape.items()}


# --- values and help: jsonargparse
# -------------------------------------------------------------------------------------------


def help_text(section: str | None = None) -> str:
    """The text of --help, or the part about one section."""
    text = build_parser(field_docs()).format_help()
    return (
        text
        if section is None
        else next(part for part in text.split("\n\n") if part.startswith(f"{section}:\n"))
    )


def build_parser(
    docs: dict[str, str] | None = None, options: Collection[str] = tuple(OPTIONS)
) -> "ArgumentParser":
    """A parser with one argument per option, of the type of its field. docs: option → help text; options:
    those to parse."""
    from jsonargparse import ArgumentParser

    # a section is a name, too
    short = {option: [f"--{name}"] for name, option in SHORT.items() if not option.startswith(f"{name}.")}
    parser = ArgumentParser(prog="megalite train", usage=USAGE, exit_on_error=False, add_help=False)
    if docs is not None:
        from megalite.config.help_width import help_width  # which a run does not need

        parser.usage = textwrap.fill(
            USAGE, help_width() - len("usage: "), subsequent_indent=" " * 7, break_on_hyphens=False
        )
        what = (
            "YAML file of sections and keys, or a name from --list_configs. Options on the command line "
            "override it."
        )
        parser.add_argument("--config", metavar="FILE|NAME", help=what)
        parser.add_argument(
            "--list_configs",
            action="store_true",
            help="Print the configurations shipped with megalite, and exit.",
        )
        parser.add_argument(
            "--print_config", action="store_true", help="Print the resolved configuration as YAML, and exit."
        )
        parser.add_argument(
            "--dry_run", action="store_true", help="Print what --world_size W ranks would need, and exit."
        )
        what = "Show this text, or that of the section whose name follows, and exit."
        parser.add_argument("--help", "-h", action="store_true", help=what)
        launcher = parser.add_argument_group("launcher")
        for name, text in LAUNCH.items():
            launcher.add_argument(f"--{name}", help=text)
    groups = {section.name: parser.add_argument_group(section.name) for section in fields(Config)}
    for option in options:
        key = OPTIONS[option]
        default = key.default if key.default_factory is MISSING else key.default_factory()
        names = [f"--{option}", *short.get(option, [])]
        groups[option.split(".")[0]].add_argument(
            *names, type=key.type, default=default, help=docs and docs[option]
        )
    return parser


def parse_values(values: dict[str, Any], source: str, words: bool = False) -> dict[str, Any]:
    """Values, or words of a command line, converted to their options' types. Raises ConfigError naming all
    that do not fit.

    A share of the steps, which no type holds, is returned as a Fraction, for `amounts.resolve_steps`.
    """
    mistakes = Mistakes()
    found = parse_all(values, source, mistakes, words)
    mistakes.report()
    return found


def parse_all(values: dict[str, Any], source: str, mistakes: Mistakes, words: bool = False) -> dict[str, Any]:
    """The same; those that do not fit are mistakes, and left out."""
    plain: dict[str, Any] = {}
    for option, value in values.items():
        with mistakes.collected():
            plain[option] = amounts.plain(option, value, source)
    shares = {option: value for option, value in plain.items() if isinstance(value, Fraction)}
    others = {option: value for option, value in plain.items() if option not in shares}
    found: dict[str, Any] = {}
    try:
        found = _parsed(others, source, words)
    except ConfigError:  # the parser stops at the first: each by itself
        for option, value in others.items():
            with mistakes.collected():
                found |= _parsed({option: value}, source, words)
    return found | shares


def _parsed(values: dict[str, Any], source: str, words: bool) -> dict[str, Any]:
    """The values in their options' types. Raises ConfigError naming one that does not fit."""
    from argparse import ArgumentError

    if not values:
        return {}
    parser, argv = build_parser(options=values), [f"--{option}={word}" for option, word in values.items()]
    try:
        parsed = (
            parser.parse_args(argv, defaults=False)
            if words
            else parser.parse_object(nest(values), defaults=False)
        )
    except OverflowError:  # an integer that no float holds, where a float is expected
        wrong = next(name for name, value in values.items() if re.fullmatch(r"[-+]?\d{300,}", str(value)))
        raise ConfigError(wrong_type(wrong, values[wrong], source)) from None
    except (ArgumentError, TypeError, ValueError) as error:
        option = next(
            (option for option in re.findall(r'key "([\w.]+)"', str(error)) if option in values), None
        )
        raise ConfigError(
            wrong_type(option, values[option], source) if option else f"A value {source} is wrong: {error}"
        ) from None
    # the parser accepts null for every type, and keys of every type in a mapping
    for option, value in values.items():
        found = parsed[option]
        for key in found if isinstance(found, dict) else ():
            if not isinstance(key, str):
                raise ConfigError(
                    f"{option} {source} has the name {show(key)}, which is not text. Write it in quotes: "
                    f"'{show(key)}'."
                )
        if found is None and NoneType not in get_args(OPTIONS[option].type):
            raise ConfigError(wrong_type(option, value, source))
    return {option: parsed[option] for option in values}


def wrong_type(option: str, value: Any, source: str) -> str:
    """The message for a value that does not fit its option's type."""
    from megalite.config.suggestions import nearest_value

    hint = OPTIONS[option].type
    message = f"{option} = {show(value)} {source} is not {describe_type(hint)}."
    if isinstance(value, (int, float)) and str in (hint, *get_args(hint)):
        return f"{message} Write it in quotes: '{show(value)}'."
    literal = next((each for each in (hint, *get_args(hint)) if get_origin(each) is Literal), None)
    choices = (
        list(map(str, get_args(literal)))
        if literal is not None
        else ["true", "false"]
        if hint is bool
        else []
    )
    near = nearest_value(option, show(value), choices)
    return message if near is None else f"{message} Nearest: {near}."


def describe_type(hint: Any) -> str:
    """A type in words."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    if hint in words:
        return words[hint]
    inner, origin = get_args(hint), get_origin(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is list:
        return f"a list [a, b] with each entry {describe_type(inner[0])}"
    if origin is dict:
        return "a mapping {name: value}" + (
            f" with each value {describe_type(inner[1])}" if inner[1] is not Any else ""
        )
    return ", or ".join(describe_type(part) for part in inner)


def field_docs() -> dict[str, str]:
    """Option → docstring: the string after the field, read from the source of its class, since Python does
    not store it."""
    import ast
    import inspect
    from itertools import pairwise

    sources = map(inspect.getsource, {inspect.getmodule(section.type) for section in fields(Config)})  # type: ignore[arg-type]
    bodies = {
        node.name: node.body
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    return {
        f"{section.name}.{ast.unparse(key.target)}": ast.literal_eval(doc.value)
        for section in fields(Config)
        for key, doc in pairwise(bodies[section.type.__name__])  # type: ignore[union-attr]
        if isinstance(key, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
