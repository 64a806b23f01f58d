"""YAML and command line → Config: default < preset or from_hf < YAML < command line.

jsonargparse checks and converts the values. An unknown key, a broken file or a wrong type ends the process with one message.
jsonargparse and yaml are imported on first use: code that only uses a Config does not need them.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from megalite.checkout import CONFIGS
from megalite.config import amounts
from megalite.config.dims import filling_dp
from megalite.config.presets import preset
from megalite.config.rule import nearest_name, show
from megalite.config.rules import check
from megalite.config.schema import Config, ConfigError
from megalite.config.token_files import fit_vocabulary

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

USAGE = (
    "megalite train [--nproc N] --config FILE.yaml|NAME [--tp N --pp N --dp N --cp N --ep N --zero N] [--section.key VALUE ...], "
    "or: torchrun --nproc-per-node N -m megalite train --config ..."
)
LAUNCH = {
    "nproc": "Start N ranks on this machine; gpu: one for each GPU. Without it this process is the only one, or one of torchrun's.",
    "nnodes": "Number of nodes (default 1), each of which runs this command with the same --nproc.",
    "node_rank": "Place of this node, from 0. Default: the nodes' order of arrival.",
    "rdzv_endpoint": "HOST:PORT where several nodes meet: an address of the first one, and a free port there.",
    "max_restarts": "Start all ranks again up to K times after one has failed (default 0).",
}
"""What `megalite.commands.launch` takes, which is no part of the configuration → help."""
SHORT = {**{name: f"parallel.{name}" for name in ("tp", "pp", "dp", "cp", "ep", "zero")}, "faults": "faults.inject"}
SECTIONS = [section.name for section in fields(Config)]
OPTIONS: dict[str, Field[Any]] = {f"{section.name}.{key.name}": key for section in fields(Config) for key in fields(section.type)}  # type: ignore[arg-type]
"""Every option, section.key → its dataclass field."""
PATHS = (
    "run.dir",
    "model.from_hf",
    "model.init_from",
    "data.train",
    "data.validation",
    "parallel.offload_dir",
    "checkpoint.load",
    "lora.init_from",
    "profiling.hardware",
)
"""Options that name files, in which ~ is the home directory."""
NOTHING_GIVEN = f"""Say what to train, for example
  megalite train --config quickstart --data.train PREFIX       (a small model; megalite prepare makes PREFIX from your text)
  megalite train --config run.yaml                             (megalite init writes run.yaml for this machine)
--list_configs lists the configurations shipped with megalite, --help [SECTION] the options: {", ".join(SECTIONS)}."""
WAIT_FOR_LOCAL_RANK_0 = 5.0
"""Seconds that the other local ranks wait before they exit: torchrun stops all ranks as soon as one exits, and local rank 0 must print."""


def load_config(argv: list[str] | None = None, *, world_size: int) -> Config:
    """The checked configuration of a run, from a command line (by default this process's).

    Exits the process without a traceback if there is nothing to run: with status 2 and one message on stderr for a wrong configuration,
    with status 0 after --help, --list_configs or --print_config. world_size: number of processes.
    """
    try:
        arguments = read_arguments(sys.argv[1:] if argv is None else argv)
        if arguments == Arguments():
            exit_with(NOTHING_GIVEN)
        if arguments.help:
            exit_with(help_text(arguments.section), status=0)
        if arguments.list_configs:
            exit_with("\n".join(f"{name:18} {what}" for name, what in shipped_configs().items()), status=0)
        config = resolve(arguments, world_size, weights=not arguments.print_config)
        if arguments.print_config and _is_local_rank_0():
            print(to_yaml(config), end="", flush=True)
        check(config, world_size)
    except ConfigError as error:
        exit_with(str(error))
    if arguments.print_config:
        raise SystemExit(0)
    return config


def exit_with(message: str, status: int = 2) -> NoReturn:
    """Exit with a status; only local rank 0 prints the message, to stderr for a status other than 0."""
    if _is_local_rank_0():
        print(message.rstrip("\n"), file=sys.stderr if status else sys.stdout, flush=True)
        if status:
            tell_torchrun(message)
    elif status:
        if threading.current_thread() is threading.main_thread():  # local rank 0 fails for all: torchrun's report need not list every rank
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(WAIT_FOR_LOCAL_RANK_0)
    raise SystemExit(status)


def tell_torchrun(message: str) -> None:
    """Let torchrun's report, which is the last thing on the screen, end with a message instead of a hint at a traceback.

    The format is that of torch.distributed.elastic.multiprocessing.errors.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": {"message": message.rstrip("\n"), "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):
            Path(file).write_text(json.dumps(content))


def _is_local_rank_0() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


# --- Config ↔ dict ↔ YAML ----------------------------------------------------------------------------------------------------


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Section → key → value, as plain data for JSON and YAML."""
    return {name: {key: amounts.share_text(value) for key, value in section.items()} for name, section in asdict(config).items()}


def from_dict(tree: dict[str, Any]) -> Config:
    """The inverse of to_dict; sections and keys may be missing. Values are not checked. Raises ConfigError on an unknown key."""
    sections = nest(flatten(tree, "in the configuration"))
    return Config(**{section.name: section.type(**sections.get(section.name, {})) for section in fields(Config)})  # type: ignore[operator]


def to_yaml(config: Config) -> str:
    """The configuration as YAML, from which `--config` reads the same configuration."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, width=140)


def write_config(config: Config, run_dir: Path) -> None:
    """Store the resolved configuration in the run's directory; a budget of memory as it was given, since it depends on the layout."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if config.train.memory_budget is not None:
        config = replace(config, train=replace(config.train, recompute="budget"))
    (run_dir / "config.yaml").write_text(to_yaml(config))


def flatten(tree: Any, source: str) -> dict[str, Any]:
    """{section: {key: value}} → {section.key: value}. Raises ConfigError on anything but known options; `source` says where it was."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{show(tree)} {source} is not a set of sections. Write `section:`, and below it, indented, `key: value`.")
    options: dict[str, Any] = {}
    for section, content in tree.items():
        if section in OPTIONS:
            raise ConfigError(
                f"{section} {source} is written in one piece. Write `{str(section).replace('.', ':` and, indented below it, `')}:`."
            )
        if section not in SECTIONS:
            raise unknown(str(section), source, SECTIONS)
        if not isinstance(content, (dict, NoneType)):
            raise ConfigError(f"{section} = {show(content)} {source} is not a section. Write its keys below it, indented, as `key: value`.")
        for key, value in (content or {}).items():
            if f"{section}.{key}" not in OPTIONS:
                raise unknown(f"{section}.{key}", source, list(OPTIONS))
            options[f"{section}.{key}"] = value
    return options


def unknown(name: str, source: str, known: list[str], dashes: str = "") -> ConfigError:
    """The error for an unknown key; names the options with the same last part, the one that other projects call so, or the most similar."""
    last = name.split(".")[-1]
    same = [option for option in OPTIONS if option.split(".")[-1] == last]
    if not same and (here := other_names().get(last.replace("-", "_").lower())):
        return ConfigError(f"{dashes}{name} {source} is not a known option. Here it is called {'' if ' = ' in here else dashes}{here}.")
    nearest = " or ".join(f"{dashes}{option}" for option in same or [nearest_name(name, known)])
    return ConfigError(f"{dashes}{name} {source} is not a known option. Nearest: {nearest}.")


@cache
def other_names() -> dict[str, str]:
    """What other projects call an option → what to write here."""
    table = read_tree(str(Path(__file__).with_name("other_names.yaml")), "other_names")
    return {name: here for here, *names in table for name in names}


# --- reading -----------------------------------------------------------------------------------------------------------------


@dataclass
class Arguments:
    """The parsed command line."""

    files: list[str] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=dict)
    help: bool = False
    section: str | None = None  # the only one to explain
    print_config: bool = False
    list_configs: bool = False


def read_arguments(argv: list[str]) -> Arguments:
    """Parse `--name VALUE` and `--name=VALUE`. Raises ConfigError on a word that is not an option, or an option without a value."""
    arguments, words = Arguments(), deque(argv)
    while words:
        word = words.popleft()
        if word in ("-h", "--help"):
            arguments.help = True
        elif arguments.help and word in SECTIONS:
            arguments.section = word
        elif word == "--print_config":
            arguments.print_config = True
        elif word == "--list_configs":
            arguments.list_configs = True
        else:
            name, equals, value = word.removeprefix("--").partition("=")
            option = SHORT.get(name, name)
            if not word.startswith("--"):
                raise ConfigError(f"{word} on the command line belongs to no option. Write --section.key VALUE.")
            if option != "config" and option not in OPTIONS:
                raise _not_here(name)
            following = value if equals else words.popleft() if words else None
            if following is None or (not equals and following.startswith("--")):
                raise ConfigError(f"--{name} on the command line has no value. Write --{name} VALUE.")
            if option == "config":
                arguments.files.append(following)
            else:
                arguments.overrides[option] = without_brackets(option, [following, *_more_entries(option, words)])
    return arguments


def _not_here(name: str) -> ConfigError:
    """The error for a name on the command line that is no option of a run."""
    if name in LAUNCH:  # `megalite train` takes them itself
        return ConfigError(
            f"--{name} on the command line is for starting the ranks of a run. Leave it out: a dry run starts none and takes their number "
            "by --world_size, and verify starts those that --tp, --pp, --dp and --cp need."
        )
    known = [*SHORT, *OPTIONS, *LAUNCH, "config", "list_configs", "print_config", "help"]
    return unknown(name, "on the command line", known, dashes="--")


def _more_entries(option: str, words: deque[str]) -> Iterator[str]:
    """Take the words that follow a list's first one and belong to it, up to the next option."""
    while takes(list, option) and words and not words[0].startswith("-"):
        yield words.popleft()


def takes(kind: type, option: str) -> bool:
    """Whether values of a kind, list or str, are among those that an option's type lists."""
    hint = OPTIONS[option].type
    return any(kind in (each, get_origin(each)) for each in (hint, *(get_args(hint) if get_origin(hint) is not list else ())))


def without_brackets(option: str, words: list[str]) -> str:
    """The words of an option's value as one; a list may be written as `a b` or `a,b`."""
    if not takes(list, option) or words[0][:1] in "[{" or words == ["null"]:
        return " ".join(words)
    if takes(str, option):  # a path may hold a comma
        return words[0] if len(words) == 1 else f"[{', '.join(words)}]"
    return f"[{', '.join(part.strip() for word in words for part in word.split(',') if part.strip())}]"


def read_tree(path: str, option: str) -> Any:
    """The content of a YAML file; option: the option that names it, for messages. Raises ConfigError if it cannot be read."""
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"), path, option)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{option} = {path} can not be read: {reason}. {_nearest_file(path)}") from None


def parse_yaml(text: str, path: str, option: str) -> Any:
    """The content of a YAML text. Raises ConfigError if it is none; path, option: where it is from, for messages."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads 3e-4 as a number and refuses duplicate keys: YAML 1.1 reads it as text and silently keeps the last of equal keys."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key} appears twice", node.start_mark)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{option} = {path} is not valid YAML: {problem}{where}. Correct the file there.") from None


def shipped_configs() -> dict[str, str]:
    """The configurations shipped with megalite: name → first line of the file's comment."""
    found = {path.stem: path for path in CONFIGS.glob("*.yaml")}
    return {name: found[name].read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name in sorted(found)}


def config_file(given: str) -> str:
    """The path of `--config`: a file or, if there is none of that name, a configuration shipped with megalite."""
    given = os.path.expanduser(given)
    if Path(given).is_file() or Path(given).name != given or Path(given).suffix in (".yaml", ".yml"):
        return given
    shipped = CONFIGS / f"{given}.yaml"
    if not shipped.is_file():
        nearest = nearest_name(given, list(shipped_configs()))
        raise ConfigError(f"--config = {given} is neither a file nor a configuration that comes with megalite. Nearest: {nearest}.")
    return str(shipped)


def _nearest_file(path: str) -> str:
    others = {other.stem: str(other) for end in ("*.yaml", "*.yml") for other in sorted(Path(path).parent.glob(end)) if other.is_file()}
    near = get_close_matches(Path(path).stem, others, n=1)
    return f"Nearest: {others[near[0]]}." if near else "Give the path of a YAML file, or a name of megalite train --list_configs."


def resolve(arguments: Arguments, world_size: int, *, weights: bool = True) -> Config:
    """The given options on top of the defaults derived from them (preset, from_hf, dp, vocabulary size, steps); not checked yet.

    Models of the Hugging Face Hub are fetched and become directories; weights: also those of model.init_from.
    """
    given: dict[str, Any] = {}
    for path in map(config_file, arguments.files):
        given = amounts.on_top(given, _file_values(path), f"in {path}")
    values = parse_values(arguments.overrides, "on the command line", words=True)
    given = amounts.on_top(given, values, "on the command line")
    given |= {option: with_home(given[option]) for option in PATHS if option in given}
    if given.get("model.init_from") or given.get("model.from_hf"):
        from megalite.config.hub import with_directories

        given |= with_directories(given, weights=weights)
    if any(option in given for option in ("lora.targets", "lora.ranks", "lora.alphas", "lora.modules_to_save")):
        from megalite.config.lora_names import with_own_names

        given |= with_own_names(given)
    config = from_dict(nest(_shape(given.get("model.preset"), given.get("model.from_hf")) | given))
    if config.parallel.dp is None:
        config.parallel.dp = filling_dp(config.parallel, world_size)
    fit_vocabulary(config, fixed="model.vocab_size" in given)
    amounts.resolve_steps(config)
    return config


def _file_values(path: str) -> dict[str, Any]:
    """The options in a YAML file; text where a list is expected is a list without brackets."""
    tree = read_tree(path, "--config")
    values = {} if tree is None else flatten(tree, f"in {path}")
    lists = {option for option, value in values.items() if isinstance(value, str) and takes(list, option) and not takes(str, option)}
    words = {option: without_brackets(option, [values[option]]) for option in lists}
    others = {option: value for option, value in values.items() if option not in lists}
    return parse_values(others, f"in {path}") | parse_values(words, f"in {path}", words=True)


def with_home(value: Any) -> Any:
    """A path, hf:PATH, or a list or mapping of paths, with ~ replaced by the home directory."""
    if isinstance(value, str):
        scheme = "hf:" if value.startswith("hf:") else ""
        return scheme + os.path.expanduser(value.removeprefix(scheme))
    if isinstance(value, list):
        return [with_home(each) for each in value]
    return {with_home(key): with_home(each) for key, each in value.items()} if isinstance(value, dict) else value


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
        from megalite.config.families import hf_shape

        shape = hf_shape(directory)
    return {f"model.{key}": value for key, value in shape.items()}


# --- values and help: jsonargparse -------------------------------------------------------------------------------------------


def help_text(section: str | None = None) -> str:
    """The text of --help, or the part about one section."""
    text = build_parser(field_docs()).format_help()
    return text if section is None else next(part for part in text.split("\n\n") if part.startswith(f"{section}:\n"))


def build_parser(docs: dict[str, str] | None = None, options: Collection[str] = tuple(OPTIONS)) -> "ArgumentParser":
    """A parser with one argument per option, of the type of its field. docs: option → help text; options: those to parse."""
    from jsonargparse import ArgumentParser

    short = {option: [f"--{name}"] for name, option in SHORT.items() if not option.startswith(f"{name}.")}  # a section is a name, too
    parser = ArgumentParser(prog="megalite train", usage=USAGE, exit_on_error=False, add_help=False)
    if docs is not None:
        what = "YAML file of sections and keys, or a name from --list_configs. Options on the command line override it."
        parser.add_argument("--config", metavar="FILE|NAME", help=what)
        parser.add_argument("--list_configs", action="store_true", help="Print the configurations shipped with megalite, and exit.")
        parser.add_argument("--print_config", action="store_true", help="Print the resolved configuration as YAML, and exit.")
        parser.add_argument("--dry_run", action="store_true", help="Print what --world_size W ranks would need, and exit.")
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
        groups[option.split(".")[0]].add_argument(*names, type=key.type, default=default, help=docs and docs[option])
    return parser


def parse_values(values: dict[str, Any], source: str, words: bool = False) -> dict[str, Any]:
    """Values, or words of a command line, converted to their options' types. Raises ConfigError naming the first that does not fit.

    A share of the steps, which no type holds, is returned as a Fraction, for `amounts.resolve_steps`.
    """
    from argparse import ArgumentError

    values = {option: amounts.plain(option, value, source) for option, value in values.items()}
    shares = {option: value for option, value in values.items() if isinstance(value, Fraction)}
    values = {option: value for option, value in values.items() if option not in shares}
    if not values:
        return dict(shares)
    parser, argv = build_parser(options=values), [f"--{option}={word}" for option, word in values.items()]
    try:
        parsed = parser.parse_args(argv, defaults=False) if words else parser.parse_object(nest(values), defaults=False)
    except OverflowError:  # an integer that no float holds, where a float is expected
        wrong = next(name for name, value in values.items() if re.fullmatch(r"[-+]?\d{300,}", str(value)))
        raise ConfigError(wrong_type(wrong, values[wrong], source)) from None
    except (ArgumentError, TypeError, ValueError) as error:
        option = next((option for option in re.findall(r'key "([\w.]+)"', str(error)) if option in values), None)
        raise ConfigError(wrong_type(option, values[option], source) if option else f"A value {source} is wrong: {error}") from None
    for option, value in values.items():  # the parser accepts null for every type, and keys of every type in a mapping
        found = parsed[option]
        for key in found if isinstance(found, dict) else ():
            if not isinstance(key, str):
                raise ConfigError(f"{option} {source} has the name {show(key)}, which is not text. Write it in quotes: '{show(key)}'.")
        if found is None and NoneType not in get_args(OPTIONS[option].type):
            raise ConfigError(wrong_type(option, value, source))
    return {option: parsed[option] for option in values} | shares


def wrong_type(option: str, value: Any, source: str) -> str:
    """The message for a value that does not fit its option's type."""
    hint = OPTIONS[option].type
    message = f"{option} = {show(value)} {source} is not {describe_type(hint)}."
    if isinstance(value, (int, float)) and str in (hint, *get_args(hint)):
        return f"{message} Write it in quotes: '{show(value)}'."
    choices = [str(choice) for choice in get_args(hint)] if get_origin(hint) is Literal else ["true", "false"] if hint is bool else []
    return f"{message} Nearest: {nearest_name(show(value), choices)}." if choices else message


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
        return "a mapping {name: value}" + (f" with each value {describe_type(inner[1])}" if inner[1] is not Any else "")
    return ", or ".join(describe_type(part) for part in inner)


def field_docs() -> dict[str, str]:
    """Option → docstring: the string after the field, read from the source of its class, since Python does not store it."""
    import ast
    import inspect
    from itertools import pairwise

    sources = map(inspect.getsource, {inspect.getmodule(section.type) for section in fields(Config)})  # type: ignore[arg-type]
    bodies = {node.name: node.body for source in sources for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return {
        f"{section.name}.{ast.unparse(key.target)}": ast.literal_eval(doc.value)
        for section in fields(Config)
        for key, doc in pairwise(bodies[section.type.__name__])  # type: ignore[union-attr]
        if isinstance(key, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
