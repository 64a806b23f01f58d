"""Metadata of torch.distributed.checkpoint that does not describe its tensors is named, and no other file is read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megalite.checkpoint import CheckpointError
from megalite.interchange.dcp_files import DcpDirectory

SHAPE = (4, 6)
Rectangles = list[tuple[tuple[int, ...], tuple[int, ...]]]
GRID = [((row, column), (2, 2)) for row in (0, 2) for column in (0, 2, 4)]


def directory(place: Path, chunks: Rectangles = GRID, change: Callable[[Any], None] = lambda metadata: None) -> Path:
    """A directory with one tensor, said to be stored in chunks, and one object."""
    dcp.save({"weight": torch.arange(24.0).view(SHAPE), "step": [1]}, checkpoint_id=place, no_dist=True)
    metadata = pickle.loads((place / ".metadata").read_bytes())
    index, info = next((index, info) for index, info in metadata.storage_data.items() if index.fqn == "weight")
    del metadata.storage_data[index]
    metadata.state_dict_metadata["weight"].chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks
    ]
    metadata.storage_data |= {MetadataIndex("weight", torch.Size(offsets)): info for offsets, _ in chunks}
    change(next(info for index, info in metadata.storage_data.items() if index.fqn == "step"))
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    return place


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (GRID[:-1], "24 elements, but its chunks have 20"),
        ([*GRID[:-1], ((2, 3), (2, 2))], r"the chunks \[2:4, 2:4\] and \[2:4, 3:5\] of weight overlap"),
        ([*GRID[:-1], ((0, 0), (1, 4))], r"of weight overlap"),
        ([*GRID[:-1], ((2, 5), (2, 2))], r"has a chunk \[2:4, 5:7\], which is not in it"),
        ([*GRID[:-1], ((-2, 4), (2, 2))], r"has a chunk \[-2:0, 4:6\], which is not in it"),
        ([((0,), (24,))], r"has a chunk \[0:24\], which is not in it"),
        ([((0, 0), (4, 8)), ((0, 0), (4, -2))], "which is not in it"),
    ],
)
def test_chunks_have_each_element_once(tmp_path: Path, chunks: Rectangles, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/\.metadata is .*{message}"):
        DcpDirectory(directory(tmp_path, chunks))


def test_chunks_that_cover_a_tensor_are_read(tmp_path: Path) -> None:
    assert list(DcpDirectory(directory(tmp_path)).tensors["weight"].chunks[0].sizes) == [2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_path": "../outside.distcp"}, "step is stored in ../outside.distcp, which is outside"),
        ({"relative_path": "deep/../../outside.distcp"}, "which is outside"),
        ({"relative_path": "/etc/passwd"}, "step is stored in /etc/passwd, which is outside"),
        ({"offset": -1}, "from byte -1 on"),
        ({"length": -1}, "in -1 bytes"),
    ],
)
def test_an_object_is_read_from_the_directory_alone(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    assert DcpDirectory(directory(tmp_path / "right")).read_object("step") == [1]
    wrong = directory(tmp_path / "wrong", change=lambda info: info.__dict__.update(change))
    with pytest.raises(CheckpointError, match=message):
        DcpDirectory(wrong)
