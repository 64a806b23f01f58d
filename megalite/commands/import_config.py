"""Convert another project's configuration to one for `megalite train`, on stdout.

    megalite import-config ds_config.json > config.yaml
    megalite import-config llama3_8b.toml --dp 64
    megalite import-config train_llama3_8b.sh
    megalite import-config 'TP=2 bash train_llama3_8b.sh 8B 64'
    megalite import-config megatron 'pretrain_gpt.py --tensor-model-parallel-size 8 --num-layers 32 ...'
    cat lora.yml | megalite import-config axolotl - --json

Projects are deepspeed (ds_config.json), accelerate (default_config.yaml), torchtitan (TOML), megatron (the
arguments of Megatron-LM, or the script that has them), axolotl, llama-factory, torchtune and TRL (YAML).
Without a name, the keys of the file tell which one it is; for TRL's, name the trainer, such as trl-dpo.

stderr lists every key that is not honoured, with the reason and the nearest option; every key that is
honoured approximately; keys that the file leaves open, with the `megalite prepare` command for its data; and
keys that do not apply. The exit status is 2 if no key could be imported. A DeepSpeed file that an
Accelerate file names, and scripts that a script starts, are read relative to that file. What the file does
not have, for example the data, is given to `megalite train`, or in a second --config.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from megalite.commands.parser import Parser, as_name, positive
from megalite.config.errors import ConfigError
from megalite.config.files import parse_yaml
from megalite.config.rule import show
from megalite.config.values import nest
from megalite.importers import megatron
from megalite.importers.convert import Imported, Remark, convert, linked_file
from megalite.importers.projects import PROJECTS

HEADINGS = {
    "lost": "not honoured",
    "approximate": "honoured approximately",
    "assumed": "not in the file, set to the project's defaults",
    "open": "not set by the file",
    "harmless": "not applicable",
}

_JSON = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*\{", re.DOTALL)
"""The beginning of a JSON object, comments first."""
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|(?://|#)[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])')
"""Text in quotes, which stays as group 1; or what JSON does not have."""


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    try:
        tree = read(options.file, options.project)
        imported = convert(tree, options.dp, read_linked(tree, options.file), options.project)
    except ConfigError as error:
        tool.error(str(error))
    print(json.dumps(as_json(imported), default=str) if options.json else as_yaml(imported))
    if not options.json:
        print(report(imported, options.file), file=sys.stderr)
    if imported.is_empty:
        tool.error(
            f"none of the keys in {name_of(options.file)} could be imported. Set the options by hand; "
            "`megalite train --help` lists them."
        )


def parser() -> Parser:
    tool = Parser(description=__doc__, allow_abbrev=False)
    what = "the configuration, - for stdin, or the command line of Megatron-LM in quotes"
    tool.add_argument("project", nargs="?", metavar="PROJECT", choices=PROJECTS, help=", ".join(PROJECTS))
    tool.add_argument("file", metavar="FILE", type=as_name, help=what)
    tool.add_argument(
        "--dp", type=positive, metavar="N", help="number of data-parallel ranks, if not set in the file"
    )
    tool.add_argument("--json", action="store_true", help="print only one JSON object on stdout")
    return tool


def read(file: str, project: str | None = None) -> Any:
    """Read a file, detecting its format by suffix or, on stdin, by content.

    Raises ConfigError if it cannot be read.
    """
    path = Path(file)
    script = project in (None, "megatron")
    if script and is_command(file):
        return megatron.parse(file, beside(Path("command")))
    try:
        text = sys.stdin.read() if file == "-" else path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"FILE = {file} cannot be read: {error.strerror}. Give the path of a configuration."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"FILE = {file} cannot be read: it is not UTF-8 text. Give the path of a configuration."
        ) from None
    if (project == "megatron" and path.suffix not in (".yaml", ".yml")) or (
        script
        and (path.suffix in (".sh", ".sbatch", ".slurm", ".bash") or (file == "-" and is_command(text)))
    ):
        return megatron.parse(text, beside(path), "" if file == "-" else file)
    try:
        if path.suffix == ".json" or _JSON.match(text):
            return parse_json(text)
        if path.suffix == ".toml" or (file == "-" and re.search(r"^\[[\w.]+\]\s*$", text, re.MULTILINE)):
            return tomllib.loads(text)
    except ValueError as error:
        kind = "TOML" if isinstance(error, tomllib.TOMLDecodeError) else "JSON"
        raise ConfigError(f"FILE {file} is not valid {kind}: {error}. Fix the file and try again.") from None
    return megatron.of_yaml(parse_yaml(text, file, "FILE"))


def read_linked(tree: Any, file: str) -> Any:
    """Read the DeepSpeed file that a file of Accelerate names; None if there is none."""
    linked = linked_file(tree)
    return None if linked is None else read(str(Path(file).parent / linked))


def beside(path: Path) -> Callable[[str], str | None]:
    """Return a function that reads scripts in the directory of a script or below."""

    def read(name: str) -> str | None:
        directory = path.parent.resolve()
        script = (directory / name).resolve()
        if not script.is_file() and not Path(name).is_absolute():
            script = Path(name).resolve()
        try:
            return (
                script.read_text(encoding="utf-8")
                if script.is_relative_to(directory) and script.is_file()
                else None
            )
        except (OSError, UnicodeDecodeError):
            return None

    return read


def is_command(text: str) -> bool:
    """Return whether a text is a command line or a script, not a path or a configuration.

    Comments in a configuration may contain options.
    """
    without_comments = re.sub(r"(^|\s)#.*", "", text)
    if (
        re.match(r"(\w+=\S*\s+)*((bash|sh|sbatch)\s+\S|\S+\.(sh|sbatch|slurm|bash)\s+[^\s:])", text)
        and not Path(text).exists()
    ):
        return True
    return text.startswith("#!") or bool(re.search(r"(^|\s)--[A-Za-z][\w-]*(\s|=)", without_comments))


def parse_json(text: str) -> Any:
    """JSON, which may have comments (//, # and /* */) and commas after a last entry, as DeepSpeed reads it.
    Raises ValueError."""
    try:
        return json.loads(text, object_pairs_hook=distinct)
    except json.JSONDecodeError:
        for extra in (_COMMENT, _LAST_COMMA):
            text = extra.sub(lambda match: match[1] or "\n" * match[0].count("\n"), text)
        return json.loads(text, object_pairs_hook=distinct)


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from a JSON object.

    Raises ValueError for duplicate keys, for which Python would silently keep the last value.
    """
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key} appears twice")
    return dict(pairs)


def as_json(imported: Imported) -> dict[str, Any]:
    """Return the result as JSON. Every key of the file is in honoured, not_honoured or notes."""
    return {
        "config": nest(imported.options),
        "honoured": imported.honoured,
        "not_honoured": [
            {"key": key, "value": value, "why": why}
            for key, value, kind, why in imported.remarks
            if kind == "lost"
        ],
        "notes": [remark._asdict() for remark in imported.remarks if remark.kind != "lost"],
    }


def as_yaml(imported: Imported) -> str:
    import yaml

    return yaml.safe_dump(nest(imported.options), sort_keys=False, allow_unicode=True, width=140).rstrip("\n")


def report(imported: Imported, file: str) -> str:
    """Format the remarks by kind. Keys with the same value and reason share a line."""
    lines = [f"{name_of(file)}, {imported.format}'s configuration: {len(imported.honoured)} keys honoured"]
    for kind, heading in HEADINGS.items():
        remarks = [remark for remark in imported.remarks if remark.kind == kind]
        lines += [f"{heading}:"] * bool(remarks)
        for why, same in groupby(sorted(remarks, key=reason), key=reason):
            lines.append(f"  {', '.join(f'{key} = {show(value)}' for key, value, *_ in same)}: {why}")
    return "\n".join(lines)


def name_of(file: str) -> str:
    return "command line" if is_command(file) else "stdin" if file == "-" else file


def reason(remark: Remark) -> str:
    return remark.why
