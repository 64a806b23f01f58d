"""List, inspect, verify, compare and consolidate checkpoints.

    megalite checkpoint list RUN                  a run's checkpoints, with their sizes, whole or damaged
    megalite checkpoint inspect CHECKPOINT        state, tensors, shapes, dtypes, bytes
    megalite checkpoint verify CHECKPOINT         reads every byte; exit status 1 if something is damaged
    megalite checkpoint diff ONE OTHER            tensor by tensor; exit status 1 if they differ
    megalite checkpoint consolidate CHECKPOINT FILE.safetensors [--optimizer] [--base HF_DIR]

A run's directory means its newest checkpoint. Checkpoints are only read, so a run may be using them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megalite.checkpoint import CheckpointError, Manifest, find, manifest_of
from megalite.checkpoint import inspect as inspecting
from megalite.commands.models import add_base_option, base_named
from megalite.commands.parser import Answer, Parser, answer, as_new_file, as_path, progress_of
from megalite.config.errors import ConfigError
from megalite.system.messages import counted
from megalite.system.progress import amount
from megalite.system.text import aligned


def main(argv: list[str] | None = None) -> int:
    tool = parser()
    options = tool.parse_args(argv)
    commands = {
        "list": list_run,
        "inspect": inspect,
        "verify": verify,
        "diff": diff,
        "consolidate": consolidate,
    }
    return answer(tool, options, commands, CheckpointError, ConfigError)


def parser() -> Parser:
    tool = Parser(description=__doc__)
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print only one JSON object on stdout")
    commands = tool.add_subparsers(
        dest="command", required=True, metavar="list|inspect|verify|diff|consolidate"
    )

    def add(name: str, description: str, *paths: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[common], help=description)
        for path in paths:
            command.add_argument(path, type=as_new_file if path == "file" else as_path, metavar=path.upper())
        return command

    add("list", "list the checkpoints of a run", "run")
    add("inspect", "print the contents of a checkpoint", "checkpoint")
    add("verify", "read every byte of a checkpoint", "checkpoint")
    add("diff", "compare two checkpoints tensor by tensor", "one", "other")
    out = add("consolidate", "write unsharded tensors to one safetensors file", "checkpoint", "file")
    out.add_argument(
        "--optimizer",
        action="store_true",
        help="also write the optimizer state and all other tensors, under their names in the checkpoint",
    )
    add_base_option(out.add_argument)
    return tool


def opened(path: Path) -> Manifest:
    return manifest_of(find(path))


def list_run(options: argparse.Namespace) -> Answer:
    entries = inspecting.entries(options.run)
    names = [", ".join(name for name in ("latest", "best") if getattr(entry, name)) for entry in entries]
    columns = aligned([(entry.name, _size(entry.bytes)) for entry in entries], left=1)
    lines = [
        f"{column}  {entry.problem or 'whole'}{f'  ({name})' if name else ''}"
        for column, entry, name in zip(columns, entries, names, strict=True)
    ]
    return {"checkpoints": [vars(entry) for entry in entries]}, lines, 0


def inspect(options: argparse.Namespace) -> Answer:
    manifest = opened(options.checkpoint)
    content = inspecting.describe(manifest)
    state = {name: value for name, value in content["state"].items() if name != "config"}
    lines = [
        content["checkpoint"],
        *(f"{name}: {json.dumps(value)}" for name, value in state.items()),
        f"{content['parameters']:,} parameters, {_size(content['bytes'])} in "
        f"{counted(len(content['files']), 'file')}",
        *(
            f"  {name}  {tensor['dtype']} {tensor['shape']}, {_size(tensor['bytes'])} in "
            f"{counted(tensor['chunks'], 'chunk')}"
            for name, tensor in content["tensors"].items()
        ),
        *_without_base(manifest),
    ]
    return content, lines, 0


def verify(options: argparse.Namespace) -> Answer:
    manifest = opened(options.checkpoint)
    with progress_of(options.json) as progress:
        damages, size = inspecting.damages(manifest, progress), sum(manifest.files.values())
    content = {"checkpoint": str(manifest.directory), "bytes": size, "whole": not damages, "damages": damages}
    return (
        content,
        damages
        or [f"{manifest.directory} is intact: {_size(size)} in {counted(len(manifest.files), 'file')}"],
        int(bool(damages)),
    )


def diff(options: argparse.Namespace) -> Answer:
    one, other = opened(options.one), opened(options.other)
    with progress_of(options.json) as progress:
        differences = list(inspecting.differences(one, other, progress))
    lines = [
        f"{difference.tensor}: {difference.what}"
        + (
            ""
            if difference.max_abs is None
            else f" differ by {difference.max_abs:.3g}, relative {difference.relative:.3g}"
        )
        for difference in differences
    ]
    listed = [difference.as_json() for difference in differences]
    content = {
        "one": str(one.directory),
        "other": str(other.directory),
        "equal": not differences,
        "differences": listed,
    }
    return content, lines or [f"equal: {len(one.tensors)} tensors, bit for bit"], int(bool(differences))


def consolidate(options: argparse.Namespace) -> Answer:
    if options.file.exists():
        raise CheckpointError(f"{options.file} already exists. Choose another path or remove it.")
    manifest = opened(options.checkpoint)
    if (base := base_named(options.base)) is not None:
        from megalite.huggingface.base_weights import moved, with_base

        manifest = with_base(moved(manifest, base))
    with progress_of(options.json) as progress:
        size = inspecting.consolidate(manifest, options.file, options.optimizer, progress)
    content = {
        "checkpoint": str(manifest.directory),
        "file": str(options.file),
        "bytes": size,
        "optimizer": options.optimizer,
    }
    lines = [f"wrote {options.file}, {_size(size)}"]
    return content, lines if base else [*lines, *_without_base(manifest)], 0


def _without_base(manifest: Manifest) -> list[str]:
    """Return a line if a checkpoint has no base, because it is quantized (`lora.base`)."""
    base = manifest.state.get("base")
    if base is None:
        return []
    source = base["source"]
    way = f". --base {source} writes their values, too" if source else ""
    return [f"the matrices of layers are not in it: they are those of {source or 'random weights'}{way}"]


def _size(count: int | None) -> str:
    return "-" if count is None else amount(count, "B")
