"""Weights of an export: each stored chunk is written to its place in a safetensors file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError, Manifest
from megalite.checkpoint.manifest import WEIGHT, StoredTensor
from megalite.families.weight_files import INDEX, SAFETENSORS
from megalite.huggingface.files import ConversionError, NewFile
from megalite.huggingface.kept_tensors import write_kept
from megalite.huggingface.merging import Adapters
from megalite.huggingface.tensor_places import TensorPlace
from megalite.system.files import write_synced
from megalite.system.progress import Report


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed when the block ends without an error.

    Raises ConversionError if it cannot be created or renamed.
    """
    temporary = target.with_name(f".{target.name}.new")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by an interrupted export
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(target)
    except OSError as error:
        raise ConversionError(f"failed to write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def stored_weights(manifest: Manifest, by_name: dict[str, TensorPlace]) -> dict[str, StoredTensor]:
    missing = [name for name in by_name if WEIGHT + name not in manifest.tensors]
    if missing:
        raise CheckpointError(f"{manifest.directory} does not contain the tensor {missing[0]} of its model")
    return {name: manifest.tensors[WEIGHT + name] for name in by_name}


def dtypes_of(
    stored: dict[str, StoredTensor], dtype: torch.dtype | None, fp32: tuple[str, ...]
) -> tuple[dict[str, torch.dtype], torch.dtype]:
    """Return the dtype of each tensor in the files, and that of the model: the widest of them.

    Tensors whose names end with `fp32` keep a wider dtype than `dtype` and do not count for the model's.
    transformers would otherwise load all weights in fp32 because of them.
    """
    dtypes = {name: dtype or getattr(torch, tensor.dtype) for name, tensor in stored.items()}
    kept = {name for name in stored if name.endswith(fp32)}
    common = max((dtypes[name] for name in dtypes.keys() - kept), key=lambda each: each.itemsize)
    dtypes |= {name: torch.promote_types(dtypes[name], getattr(torch, stored[name].dtype)) for name in kept}
    return dtypes, common


def write_weights(
    directory: Path,
    adapters: Adapters,
    stored: dict[str, StoredTensor],
    by_name: dict[str, TensorPlace],
    dtypes: dict[str, torch.dtype],
    biases: dict[str, Tensor],
    kept: dict[str, Tensor],
    limit: int,
    progress: Report,
) -> None:
    """Write the safetensors files and, if there are several, their index.

    The last file with weights contains the router biases. Tensors that were kept aside are in a file of their
    own.
    """
    shards = list(_shards(by_name, dtypes, limit))
    number = len(shards) + bool(kept)
    names = (
        [SAFETENSORS]
        if number == 1
        else [f"model-{i + 1:05d}-of-{number:05d}.safetensors" for i in range(number)]
    )
    index: dict[str, str] = {}
    done, total = 0, sum(place.numel * dtypes[name].itemsize for name, place in by_name.items())
    if kept:
        write_kept(directory, names[-1], kept)
        index |= dict.fromkeys(kept, names[-1])
    for file_name, own in zip(names, shards, strict=False):
        tensors = {
            theirs: (dtypes[parts[0]], shape)
            for parts in own.values()
            for theirs, shape in by_name[parts[0]].tensors.items()
        }
        more = biases if file_name == names[len(shards) - 1] else {}
        tensors |= {theirs: (bias.dtype, tuple(bias.shape)) for theirs, bias in more.items()}
        index |= dict.fromkeys(more, file_name)
        with closing(NewFile(directory / file_name, tensors)) as file:
            for theirs, bias in more.items():
                file.write(theirs, bias)
            for parts in own.values():
                _write_tensor(
                    file, adapters, {name: stored[name] for name in parts}, by_name, dtypes[parts[0]]
                )
                index |= dict.fromkeys(by_name[parts[0]].tensors, file_name)
                done += sum(by_name[name].numel * dtypes[name].itemsize for name in parts)
                progress("exporting", done, total, "B")
    if number > 1:
        others = sum(tensor.nbytes for tensor in (*biases.values(), *kept.values()))
        content = {
            "metadata": {"total_size": total + others},
            "weight_map": index,
        }
        write_synced(directory / f"{SAFETENSORS}{INDEX}", json.dumps(content, indent=2) + "\n")


def _shards(
    by_name: dict[str, TensorPlace], dtypes: dict[str, torch.dtype], limit: int
) -> Iterator[dict[str, list[str]]]:
    """Yield the files, each of at most `limit` bytes: name of a Hugging Face tensor → names of our tensors in
    it.
    """
    joined: dict[str, list[str]] = {}
    for name, place in by_name.items():
        joined.setdefault(place.theirs, []).append(name)
    shard: dict[str, list[str]] = {}
    size = 0
    for theirs, names in joined.items():
        more = sum(by_name[name].numel * dtypes[name].itemsize for name in names)
        if shard and size + more > limit:
            yield shard
            shard, size = {}, 0
        shard[theirs], size = names, size + more
    yield shard


def _write_tensor(
    file: NewFile,
    adapters: Adapters,
    parts: dict[str, StoredTensor],
    by_name: dict[str, TensorPlace],
    dtype: torch.dtype,
) -> None:
    """Write one Hugging Face tensor with merged adapters.

    It is written chunk by chunk if all chunks are consecutive whole rows, otherwise it is assembled first.
    """
    place = by_name[next(iter(parts))]
    by_rows = (
        (place.theirs in place.tensors or bool(place.pieces))
        and not (place.transposed or place.each_transposed)
        and all(
            isinstance(by_name[name].rows, range) and chunk.sizes[1:] == each.shape[1:]
            for name, each in parts.items()
            for chunk in each.chunks
        )
    )
    whole = None if by_rows else torch.empty(place.shape, dtype=dtype)
    for name, tensor in parts.items():
        for chunk, data in adapters.manifest.read(tensor.chunks):
            values = adapters.merged(
                name, chunk, torch.from_numpy(data).view(getattr(torch, tensor.dtype)).view(chunk.sizes)
            )
            if whole is None:
                _write_rows(file, place, by_name[name].rows[0] + chunk.offsets[0], values.to(dtype))
            else:
                by_name[name].write(whole, chunk.offsets, values.to(dtype))
    if whole is not None:
        for theirs, piece in zip(place.tensors, place.stored(whole).chunk(len(place.tensors)), strict=True):
            file.write(theirs, piece)


def _write_rows(file: NewFile, place: TensorPlace, row: int, values: Tensor) -> None:
    """Write consecutive whole rows. Rows of a layer's experts belong to several tensors."""
    width = prod(place.shape[1:])
    length = place.shape[0] // max(len(place.pieces), 1)  # rows of one tensor
    while len(values):
        number, first = divmod(row, length)
        own = values[: length - first]
        file.write(
            place.theirs.format(*place.pieces[number]) if place.pieces else place.theirs, own, first * width
        )
        row, values = row + len(own), values[len(own) :]
