"""What a command's MODEL names, the same for every command: a preset, a configuration, a Hugging Face model,
a run or a checkpoint."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from megalite.checkpoint import CheckpointError, find, manifest_of
from megalite.commands.parser import as_name, as_tokenizer
from megalite.config import run_files
from megalite.config.arguments import Arguments
from megalite.config.errors import ConfigError
from megalite.config.files import config_file, read_tree, shipped_configs
from megalite.config.load import flatten, from_dict, resolve
from megalite.config.precision import AUTO
from megalite.config.repository_id import is_repository_id
from megalite.config.rule import import_first, is_checkpoint, suggestion
from megalite.config.schema import Config
from megalite.config.values import nest
from megalite.families import hub
from megalite.families.model_config import from_hf_config, hf_config
from megalite.families.presets import presets

HF = "hf:"
KINDS = (
    "a preset, a shipped configuration, a .yaml or config.json, hf:DIR, org/name on the Hugging Face Hub, or "
    "a directory"
)
AXES = ("tp", "pp", "cp")


@dataclass(frozen=True)
class NamedModel:
    """A model by its name.

    Attributes:
        kind: "config.json" is such a file alone, under another name; or no file at all.
        name: of a preset; else the path of the configuration, of the Hugging Face directory, or of the run or
            checkpoint.
    """

    kind: Literal["preset", "configuration", "huggingface", "config.json", "checkpoint"]
    name: str


def find_model(given: str, part: hub.Part, option: str) -> NamedModel | None:
    """Find the model with a name, or None if there is none. Paths take precedence over names.

    Raises ConfigError if a model cannot be fetched.
    """
    name = os.path.expanduser(given.removeprefix(HF))
    if given.startswith(HF):
        return NamedModel(
            "huggingface", _hf_directory(hub.directory(name, part, f"{option} {given}"), option, given)
        )
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return NamedModel("configuration", name)
    if path.suffix == ".json":
        return (
            NamedModel("huggingface", str(path.parent))
            if path.name == "config.json" and path.is_file()
            else NamedModel("config.json", name)
        )
    if is_checkpoint(name):
        return NamedModel("checkpoint", name)
    if (path / "config.json").is_file():
        return NamedModel("huggingface", name)
    if (path / run_files.CONFIG).is_file():
        return NamedModel("configuration", str(path / run_files.CONFIG))
    if name in presets():
        return NamedModel("preset", name)
    if name in shipped_configs():
        return NamedModel("configuration", config_file(name))
    if is_repository_id(name) and (directory := hub.directory(name, part, f"{option} {given}")) != name:
        return NamedModel("huggingface", _hf_directory(directory, option, given))
    return None


def _hf_directory(directory: str, option: str, given: str) -> str:
    try:
        hf_config(directory)
    except ConfigError as error:
        raise ConfigError(f"{option} {given}: {error}") from None
    return directory


def shape_named(given: str, option: str) -> NamedModel:
    """Return the named model shape. Raises ConfigError if it does not exist."""
    model = find_model(given, "shape", option)
    if model is None:
        near = suggestion(given, [*presets(), *shipped_configs()])
        raise ConfigError(
            f"{option} {given} is not a known model. Expected {KINDS}. Presets: {', '.join(presets())}.{near}"
        )
    return model


def config_of(
    given: str,
    world_size: int,
    option: str = "--model",
    *,
    replacing: Mapping[str, int | str | None] | None = None,
    precision: str | None = "bf16",
    auto: str | None = None,
) -> Config:
    """The configuration that a name stands for: all options of a configuration or run; of others, the model.

    Args:
        world_size: the number of ranks.
        option: where the name was given, for messages.
        replacing: options that replace those of a configuration, such as data.sequence_length; its number of
            tokens counts steps of that size.
        precision: train.precision where the configuration has none; None: the option's default.
        auto: train.precision where the configuration says auto; None: `precision`, or else that of this
            machine.

    Raises:
        ConfigError: there is no such model, or it cannot be read.
    """
    model = shape_named(given, option)
    if model.kind == "checkpoint":
        return _of_checkpoint(Path(model.name))
    replaced = {name: str(value) for name, value in (replacing or {}).items() if value is not None}
    default = {} if precision is None else {"train.precision": precision}
    if model.kind == "config.json":
        shape = {
            f"model.{key}": value for key, value in from_hf_config(_json(Path(model.name), option)).items()
        }
        return from_dict(nest({**shape, **default}))
    if model.kind == "configuration":
        precision_option = options_in(model.name, option).get("train.precision")
        if precision_option == AUTO:
            default = default if auto is None else {"train.precision": auto}
        return resolve(
            Arguments([model.name], replaced | (default if precision_option in (None, AUTO) else {})),
            world_size,
            weights=False,
        )
    key = "model.preset" if model.kind == "preset" else "model.from_hf"
    return resolve(Arguments(overrides={key: model.name, **default, **replaced}), world_size)


def options_in(file: str, option: str) -> dict[str, Any]:
    """Return the options set in a configuration file, section.key → value.

    Raises ConfigError if it cannot be read.
    """
    tree = read_tree(file, option)
    return {} if tree is None else flatten(tree, f"in {file}")


def _of_checkpoint(path: Path) -> Config:
    try:
        state = manifest_of(find(path)).state
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if "config" not in state:
        raise ConfigError(
            f"{path} contains no configuration. Use a checkpoint written by megalite train or megalite "
            "convert."
        )
    return from_dict(state["config"])


def _json(path: Path, option: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be read: {error.strerror}. Pass the config.json of a Hugging Face model."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{option} {path} is not valid JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{option} {path} is not a JSON object. Pass the config.json of a Hugging Face model."
        )
    return content


def weights_of(given: str, option: str = "the model") -> str:
    """A checkpoint's or run's directory, or hf:DIR, for a name that stands for weights.

    Raises ConfigError for one without weights, CheckpointError for a name that stands for nothing.
    """
    model = find_model(given, "weights", option)
    if model is None:
        if (other := import_first(given)) is not None:
            raise ConfigError(f"{option} {given} is not a checkpoint of megalite. {other}")
        manifest_of(find(Path(given)))  # which says what it is not
        return given
    if model.kind == "preset":
        raise ConfigError(
            f"{option} {given} is a preset, which has no weights. Pass a checkpoint, a run, hf:DIR or "
            "org/name."
        )
    if model.kind == "configuration":
        return _run_of(given, Path(model.name), option)
    return f"{HF}{model.name}" if model.kind == "huggingface" else model.name


def _run_of(given: str, file: Path, option: str) -> str:
    """Return the run directory of a configuration."""
    run = resolve(Arguments(files=[str(file)]), 1, weights=False).run.directory
    if not is_checkpoint(str(run)):
        raise ConfigError(
            f"{option} {given}: no checkpoint found in run {run}. Train it first with megalite train."
        )
    return str(run)


def hf_directory(given: str, part: hub.Part, option: str) -> Path:
    """The directory of a Hugging Face model that is given as a directory, hf:DIR, config.json or org/name.
    Raises ConfigError."""
    model = find_model(given, part, option)
    if model is not None and model.kind != "huggingface":
        raise ConfigError(
            f"{option} {given} is not a Hugging Face model. Pass a model directory, or org/name on the Hub."
        )
    directory = Path(given if model is None else model.name)
    if part == "weights":
        hf_config(directory)
    return directory


def add_tokenizer_options(add: Callable[..., Any]) -> None:
    """Add the options that select a tokenizer. `add` is the `add_argument` of a parser."""
    add(
        "--tokenizer",
        type=as_tokenizer,
        metavar="byte|FILE.model|HF_DIR",
        help="tokenizer (default: the model's own)",
    )
    add(
        "--allow_tokenizer_change",
        action="store_true",
        help="accept a tokenizer that differs from the one used in training",
    )


def add_average_option(add: Callable[..., Any]) -> None:
    """Add the option that selects the moving average of the weights."""
    add(
        "--ema",
        action="store_true",
        help="use the moving average of the weights (train.ema_decay) instead of the weights",
    )


def add_base_option(add: Callable[..., Any]) -> None:
    """Add the option that says where the quantized base of a checkpoint's adapters is."""
    add(
        "--base",
        type=as_name,
        metavar="hf:DIR|CHECKPOINT_DIR|org/name",
        help="the frozen weights under the adapters of a checkpoint that was trained with lora.base "
        "(default: where the run read them)",
    )


def base_named(given: str | None) -> str | None:
    """Return hf:DIR or a checkpoint that --base names. Raises ConfigError or CheckpointError."""
    try:
        return None if given is None else weights_of(given, "--base")
    except CheckpointError as error:
        raise CheckpointError(f"--base {given} cannot be read: {error}") from None


def add_layout_options(add: Callable[..., Any], size: Callable[[str], int], rows: str) -> None:
    """Declare the layout and precision of a forward pass.

    Args:
        size: parses a number of ranks.
        rows: names what context parallelism divides.
    """
    add("--tp", type=size, default=1, help="tensor-parallel ranks (default 1)")
    add("--pp", type=size, default=1, help="pipeline stages (default 1)")
    add(
        "--cp",
        type=size,
        default=1,
        help=f"context-parallel ranks, which split every {rows} (default 1)",
    )
    add(
        "--precision",
        choices=["fp32", "bf16"],
        help="dtype of weights and arithmetic (default: bf16 on a GPU, fp32 on a CPU)",
    )


def layout_of(options: argparse.Namespace, others: Sequence[str] = ()) -> dict[str, Any]:
    """The layout of a model for forward passes that a command was given.

    Args:
        others: further axes that the command has.

    Raises:
        ConfigError: it does not match the started ranks.
    """
    layout = {axis: getattr(options, axis) for axis in (*AXES, *others)}
    ranks = prod(layout.values())
    world = int(os.environ.get("WORLD_SIZE", ranks))
    if world != ranks:
        requested = ", ".join(f"--{axis} {size}" for axis, size in layout.items())
        raise ConfigError(f"{requested} requires {ranks} ranks, but {world} were started.")
    return layout
