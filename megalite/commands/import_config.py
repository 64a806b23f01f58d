"""Convert DeepSpeed's ds_config.json or Accelerate's default_config.yaml to a configuration for `megalite train`, on stdout.

    megalite import-config ds_config.json > config.yaml
    megalite import-config default_config.yaml --json

stderr lists every key that is not honoured, with the reason and the nearest option; every key that is honoured approximately; keys that the
file leaves open (`auto`); and keys without meaning here. A DeepSpeed file that an Accelerate file names is read relative to that file.
Such files do not contain the data, the model and train.steps: give them to `megalite train`, or in a second --config.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from megalite.commands.parser import Parser, as_path
from megalite.config.importers.convert import Imported, Remark, convert, linked_file
from megalite.config.load import nest, read_tree
from megalite.config.rule import show
from megalite.config.schema import ConfigError

HEADINGS = {
    "lost": "not honoured",
    "approximate": "honoured approximately",
    "assumed": "not in the file, taken from its program's defaults",
    "open": "left open by the file",
    "harmless": "without meaning here",
}


def main(argv: list[str] | None = None) -> None:
    tool = parser()
    options = tool.parse_args(argv)
    try:
        tree = read(options.file)
        linked = linked_file(tree)
        found = convert(tree, options.dp, None if linked is None else read(options.file.parent / linked))
    except ConfigError as error:
        tool.error(str(error))
    print(json.dumps(as_json(found), default=str) if options.json else as_yaml(found))
    if not options.json:
        print(report(found, options.file), file=sys.stderr)


def parser() -> Parser:
    made = Parser(description=__doc__, allow_abbrev=False)
    made.add_argument("file", metavar="FILE", type=as_path, help="ds_config.json, or a YAML file of `accelerate config`")
    made.add_argument("--dp", type=positive, metavar="N", help="number of data-parallel ranks, if the file does not set it")
    made.add_argument("--json", action="store_true", help="print only one JSON object on stdout")
    return made


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def read(path: Path) -> Any:
    """A file's content: JSON if it ends in .json, else YAML. Raises ConfigError if it cannot be read."""
    if path.suffix != ".json":
        return read_tree(str(path), "FILE")
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=distinct)
    except OSError as error:
        raise ConfigError(f"FILE = {path} can not be read: {error.strerror}. Give the path of a JSON or YAML file.") from None
    except ValueError as error:
        raise ConfigError(f"FILE = {path} is not valid JSON: {error}. Correct it there.") from None


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict. Raises ValueError for duplicate keys, of which Python would silently keep the last."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key} appears twice")
    return dict(pairs)


def as_json(found: Imported) -> dict[str, Any]:
    """The result as JSON: every key of the file is in honoured, not_honoured or notes."""
    return {
        "config": nest(found.options),
        "honoured": found.honoured,
        "not_honoured": [{"key": key, "value": value, "why": why} for key, value, kind, why in found.remarks if kind == "lost"],
        "notes": [remark._asdict() for remark in found.remarks if remark.kind != "lost"],
    }


def as_yaml(found: Imported) -> str:
    import yaml

    return yaml.safe_dump(nest(found.options), sort_keys=False, allow_unicode=True, width=140).rstrip("\n")


def report(found: Imported, path: Path) -> str:
    """The remarks by kind, keys with the same value and reason on one line."""
    lines = [f"{path}, {found.format}'s configuration: {len(found.honoured)} keys honoured"]
    for kind, heading in HEADINGS.items():
        remarks = [remark for remark in found.remarks if remark.kind == kind]
        lines += [f"{heading}:"] * bool(remarks)
        for why, same in groupby(sorted(remarks, key=reason), key=reason):
            lines.append(f"  {', '.join(f'{key} = {show(value)}' for key, value, *_ in same)}: {why}")
    return "\n".join(lines)


def reason(remark: Remark) -> str:
    return remark.why
