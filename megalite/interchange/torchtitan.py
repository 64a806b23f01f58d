"""torchtitan's checkpoints of Llama 3, and of other dense models with its names: a DCP directory.

    layers.0.attention.qkv_linear.wq.weight          or layers.0.attention.wq.weight in earlier versions
    optimizer.state.layers.0.attention.….exp_avg     state of AdamW by the name of the parameter
    train_state.step                                 steps done

Rotary embeddings rotate neighboring channels there. A checkpoint does not say what its model is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.checkpoint.errors import listing
from megalite.config.schema import Config
from megalite.families.module_names import Names
from megalite.huggingface.tensor_places import TensorPlace, named_places
from megalite.interchange.dcp_files import METADATA, DcpDirectory
from megalite.interchange.import_state import RunPosition, Source, check_model
from megalite.model.parameters import model_specs, weight_shapes

_NAMES = Names(
    {"tok_embeddings": "embedding", "norm": "norm", "output": "head"},
    "layers",
    {
        "attention.wq": "attention.q",
        "attention.wk": "attention.k",
        "attention.wv": "attention.v",
        "attention.wo": "attention.out",
        "feed_forward.w1": "mlp.gate",
        "feed_forward.w3": "mlp.up",
        "feed_forward.w2": "mlp.down",
        "attention_norm": "input_norm",
        "ffn_norm": "mlp_norm",
    },
    interleaved=True,
)
SPELLINGS = (
    ("output.weight", "lm_head.weight"),
    (".attention.w", ".attention.qkv_linear.w"),
)
"""Parts of names in earlier versions, and in later ones."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = re.compile(r"optimizer\.state\.(.+)\.(exp_avg|exp_avg_sq|step)")
_OTHERS = ("optimizer.", "lr_scheduler", "dataloader", "train_state", "ft_dataloader")


def torchtitan_source(
    directory: Path,
    given: Config | None,
    *,
    weights_only: bool = False,
    drop_mtp: bool = False,
    drop_padding: bool = False,
) -> Source:
    """Return the source of an import.

    Args:
        given: the model.
        weights_only: leave out the state of the optimizer.
        drop_mtp, drop_padding: options of other sources, which are rejected.

    Raises:
        CheckpointError: it cannot be read, or does not match the model.
    """
    if drop_padding:
        raise CheckpointError(
            "--drop_padding applies to megatron:DIR only: torchtitan does not pad the vocabulary. Leave it "
            "out."
        )
    if drop_mtp:
        raise CheckpointError(
            "--drop_mtp applies to megatron:DIR and Hugging Face directories only: models of torchtitan that "
            "are read have no multi-token prediction modules. Leave it out."
        )
    if not (directory / METADATA).is_file():
        raise CheckpointError(
            f"{directory} is not a checkpoint of torchtitan: expected {METADATA}. Pass the directory of "
            "one step, "
            "such as outputs/checkpoint/step-1000."
        )
    if given is None:
        raise CheckpointError(
            f"{directory} does not say what its model is. Pass --model with a configuration, for example "
            "one that "
            "`megalite import-config` has made of the job's TOML file, or a preset."
        )
    files = DcpDirectory(directory)
    config = _with_vocabulary(given, files)
    check_model(config.model, "--model")
    places = _places(config, files)
    kinds = _kinds(files, places) if not weights_only else ()

    def read(kind: str, ours: str) -> Iterator[tuple[int, Tensor]]:
        place = places[ours]
        whole = files.read(place.theirs if kind == "weight" else f"optimizer.state.{place.theirs}.{kind}")
        shape = [
            segment.shape
            for spec in model_specs(config.model)
            for segment in spec.segments
            if segment.name == ours
        ]
        yield 0, place.read(whole, (0,) * len(shape[0]), shape[0])

    return Source(
        str(directory),
        config,
        kinds,
        read,
        {},
        _position(files, places, config) if kinds else None,
        {"format": "torchtitan"},
    )


def _with_vocabulary(given: Config, files: DcpDirectory) -> Config:
    name = "tok_embeddings.weight"
    if name not in files.tensors:
        raise CheckpointError(
            f"{files.directory} has no {name}, which every model of torchtitan has: found "
            f"{', '.join([*files.tensors][:3])}"
        )
    if given.model.vocab_size is not None:
        return given
    return replace(given, model=replace(given.model, vocab_size=files.tensors[name].shape[0]))


def _places(config: Config, files: DcpDirectory) -> dict[str, TensorPlace]:
    """Return the places with the names of the checkpoint. Raises CheckpointError."""
    places = {name: _spelled(place, files) for name, place in named_places(config.model, _NAMES).items()}
    shapes = weight_shapes(config.model)
    if homeless := [name for name in shapes if name not in places]:
        raise CheckpointError(
            f"{homeless[0]} of --model has no tensor in the dense models of torchtitan whose names are "
            "read. Export "
            "the checkpoint to a Hugging Face directory with torchtitan, and import this."
        )
    expected = {place.theirs: place.shape for place in places.values()}
    problems = [f"{name} is missing" for name in expected if name not in files.tensors]
    for name, tensor in files.tensors.items():
        if name in expected and tensor.shape != expected[name]:
            problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected[name])}")
        elif name not in expected and not name.startswith(_OTHERS) and not _is_copy(name, config):
            problems.append(f"{name} is not a tensor of the model")
    if problems:
        raise CheckpointError(f"{files.directory} does not match --model:{listing(problems)}")
    return places


def _is_copy(name: str, config: Config) -> bool:
    return name == "freqs_cis" or (config.model.tied_head and name in ("output.weight", "lm_head.weight"))


def _spelled(place: TensorPlace, files: DcpDirectory) -> TensorPlace:
    for earlier, later in SPELLINGS:
        other = place.theirs.replace(earlier, later)
        if other in files.tensors:
            return replace(place, theirs=other)
    return place


def _kinds(files: DcpDirectory, places: Mapping[str, TensorPlace]) -> tuple[str, ...]:
    """Return the kinds of state of AdamW, or none if there is no optimizer. Raises CheckpointError."""
    if not any(_STATE.fullmatch(name) for name in files.tensors):
        return ()
    for place in places.values():
        for kind in MOMENTS:
            name = f"optimizer.state.{place.theirs}.{kind}"
            if name not in files.tensors:
                raise CheckpointError(
                    f"{files.directory} has no {name}: only the state of AdamW is imported. Import the "
                    "weights alone "
                    "with --weights_only."
                )
            if files.tensors[name].shape != place.shape:
                raise CheckpointError(
                    f"{files.directory}: {name} has shape {list(files.tensors[name].shape)}, expected "
                    f"{list(place.shape)}"
                )
    return MOMENTS


def _position(files: DcpDirectory, places: Mapping[str, TensorPlace], config: Config) -> RunPosition:
    first = next(iter(places.values())).theirs
    updates = int(_value(files, f"optimizer.state.{first}.step", 0))
    step = max(int(_value(files, "train_state.step", updates)), updates)
    return RunPosition(step, updates, step * config.train.global_batch_size)


def _value(files: DcpDirectory, name: str, default: int) -> Any:
    """Return a number, which is a tensor or a pickled object."""
    if name in files.tensors:
        return files.read(name).item()
    value = files.read_object(name) if name in files.objects else default
    return value.item() if isinstance(value, torch.Tensor) else value
