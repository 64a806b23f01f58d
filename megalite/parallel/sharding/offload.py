"""Optimizer state in CPU memory, or in a memory-mapped file.

An optimizer step processes offloaded state in windows:

    copy      the next window's gradients to pinned memory; the disk reads the window's pages ahead
    update    this window's master weights and moments, on the CPU
    copy      the window's new weights back in compute precision; the disk's pages are evicted from memory

With two staging buffers in each direction the copies of neighboring windows overlap with an update (Ren et
al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity). If the weights are on the CPU, nothing is
copied. No communication, except in `Uploads`, which all-gathers ZeRO-3's weights.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import torch
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending, all_gather
from megalite.parallel.sharding.state_memory import StateMemory, StateRange

# elements, 12 MiB of fp32 masters and moments; a multiple of 64, so that vectorized updates round the same
WINDOW = 1 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; missing in Python's mmap


class OffloadError(RuntimeError):
    """Raised if offloaded optimizer state can no longer be read or written.

    The message contains the directory and the reason.
    """


class CPUState(StateMemory):
    """Optimizer state in CPU memory, updated there."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._staging: _Staging | None = None

    def windows(self, ranges: Sequence[StateRange]) -> Iterator[list[StateRange]]:
        """Yield one window at a time.

        During its update the gradients and pages of the next window and the weights of the last one are
        copied.
        """
        cut = [window for each in ranges for window in each.cut(WINDOW)]
        if self._staging is None and cut and cut[0].grads.is_cuda:
            widest = max((each.weights.dtype for each in cut), key=lambda dtype: dtype.itemsize)
            self._staging = _Staging(cut[0].grads, widest)
        if self._staging is not None:
            self._staging.begin()
        for index, window in enumerate(cut):
            if index == 0:
                self._expect(0, window)
            if index + 1 < len(cut):
                self._expect(index + 1, cut[index + 1])
            yield [self._load(index, window)]
            self._unload(index, window)
        if self._staging is not None:
            self._staging.end()

    def _expect(self, index: int, window: StateRange) -> None:
        """Start fetching a window."""
        if self._staging is not None:
            self._staging.fetch(index, window.grads)

    def _load(self, index: int, window: StateRange) -> StateRange:
        """Return the window with all its tensors in CPU memory."""
        if self._staging is None:
            return window
        weights = self._staging.room(index, window.weights) if window.weights.is_cuda else window.weights
        return replace(window, grads=self._staging.fetched(index, window.grads), weights=weights)

    def _unload(self, index: int, window: StateRange) -> None:
        """Copy the updated weights to those of the model. The window's CPU memory can then be reused."""
        if window.weights.is_cuda:
            assert self._staging is not None
            self._staging.send(index, window.weights)


class _Staging:
    """Pinned memory between a GPU and the optimizer on the CPU.

    It has two buffers in each direction, so that copies overlap with updates.

    Args:
        widest: dtype of the widest weights.
    """

    def __init__(self, grads: Tensor, widest: torch.dtype):
        self._grads, self._weights = (
            [torch.empty(WINDOW, dtype=dtype, pin_memory=True) for _ in range(2)]
            for dtype in (grads.dtype, widest)
        )
        self._device = grads.device
        self._incoming, self._outgoing = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._arrived, self._left = ([torch.cuda.Event(), torch.cuda.Event()] for _ in range(2))

    def begin(self) -> None:
        """Make the copies wait for the queued work of the GPU.

        After it gradients are complete, and the old weights are no longer read.
        """
        for stream in (self._incoming, self._outgoing):
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, index: int, grads: Tensor) -> None:
        """Start copying the gradients of a window.

        The window two before it, which used the same buffer, must have been updated.
        """
        with torch.cuda.stream(self._incoming):
            self._grads[index % 2][: grads.numel()].copy_(grads, non_blocking=True)
            self._arrived[index % 2].record()

    def fetched(self, index: int, grads: Tensor) -> Tensor:
        """Wait for the copy of a window's gradients and return it."""
        self._arrived[index % 2].synchronize()
        return self._grads[index % 2][: grads.numel()]

    def room(self, index: int, weights: Tensor) -> Tensor:
        """Return the buffer for a window's new weights, once its previous content has been sent."""
        self._left[index % 2].synchronize()
        return self._weights[index % 2].view(weights.dtype)[: weights.numel()]

    def send(self, index: int, weights: Tensor) -> None:
        """Start copying the new weights of a window to those of the model."""
        with torch.cuda.stream(self._outgoing):
            weights.copy_(self._weights[index % 2].view(weights.dtype)[: weights.numel()], non_blocking=True)
            self._left[index % 2].record()

    def end(self) -> None:
        """Make later work of the GPU wait for the new weights."""
        torch.cuda.current_stream(self._device).wait_stream(self._outgoing)


class DiskState(CPUState):
    """Optimizer state in a memory-mapped file of this process, with only the current windows in memory.

    The file has no name, so that it is removed in any case when the process ends. Its space is reserved when
    a tensor is created: a full disk then raises an error, instead of causing a bus error later. Evicted pages
    stay in the page cache while it has room; the kernel decides when to write them.

    Raises:
        ConfigError: the directory cannot hold the file.
    """

    def __init__(self, directory: Path):
        super().__init__()
        self.directory = directory
        self.file = _open(directory)
        # by address, because advice on other memory would drop its content
        self._mappings: dict[int, mmap.mmap] = {}

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        size, start = (
            -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE,
            os.fstat(self.file.fileno()).st_size,
        )
        _check_room(self.directory, size)
        try:
            os.posix_fallocate(self.file.fileno(), start, size)
        except OSError as error:
            raise _no_room(self.directory, size, error.strerror) from None
        mapping = mmap.mmap(self.file.fileno(), size, offset=start)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=count)
        self._mappings[tensor.data_ptr()] = mapping
        return tensor

    def place_of(self, tensor: Tensor) -> str:
        return "disk" if tensor.untyped_storage().data_ptr() in self._mappings else super().place_of(tensor)

    def release(self, tensor: Tensor | None = None) -> None:
        if tensor is not None:
            self._advise(tensor, mmap.MADV_DONTNEED)
            return
        for mapping in self._mappings.values():
            mapping.madvise(mmap.MADV_DONTNEED)

    def sync(self) -> None:
        """Also raise OffloadError for pages that the kernel failed to write since the file was created.

        Their content is lost.
        """
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            raise self._lost(error) from error

    def _expect(self, index: int, window: StateRange) -> None:
        self._advise_all(window, mmap.MADV_WILLNEED)
        super()._expect(index, window)

    def _load(self, index: int, window: StateRange) -> StateRange:
        self._advise_all(window, MADV_POPULATE_WRITE)
        return super()._load(index, window)

    def _unload(self, index: int, window: StateRange) -> None:
        super()._unload(index, window)
        self._advise_all(window, mmap.MADV_DONTNEED)

    def _advise_all(self, window: StateRange, advice: int) -> None:
        for tensor in (window.master, *window.state):
            self._advise(tensor, advice)

    def _advise(self, tensor: Tensor, advice: int) -> None:
        """Advise the kernel on the pages of a tensor, if they belong to this file.

        DONTNEED on a shared mapping loses no data.
        """
        mapping = self._mappings.get(tensor.untyped_storage().data_ptr())
        if mapping is None:
            return
        start = int(tensor.storage_offset()) * tensor.itemsize
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            mapping.madvise(advice, first, start + int(tensor.nbytes) - first)
        except OSError as error:  # populating reports errors that would otherwise kill the process on access
            # EINVAL from older kernels: pages are loaded on access
            if error.errno != errno.EINVAL or advice != MADV_POPULATE_WRITE:
                raise self._lost(error) from error

    def _lost(self, error: OSError) -> OffloadError:
        reason = (
            "its pages could not be read from, or allocated on, the disk"
            if error.errno == errno.EFAULT
            else error.strerror
        )
        return OffloadError(
            f"The file with the optimizer state in parallel.offload_dir={self.directory} is "
            f"corrupted: {reason}. No checkpoint was written from it. Restart from the newest "
            "checkpoint with another directory, or with parallel.offload=cpu."
        )


def check_directory(directory: Path, wanted: int) -> None:
    """Create a directory.

    Raises:
        ConfigError: it is not writable or has less than `wanted` bytes of space.
    """
    _open(directory).close()
    _check_room(directory, wanted)


def _open(directory: Path) -> IO[bytes]:
    """Create a file without a name."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return TemporaryFile(dir=directory)
    except OSError as error:
        raise ConfigError(
            f"Could not write to parallel.offload_dir={directory}: {error.strerror}. Choose a "
            "writable directory on a local disk, or set parallel.offload=cpu."
        ) from None


def _check_room(directory: Path, wanted: int) -> None:
    if wanted > shutil.disk_usage(directory).free:
        raise _no_room(directory, wanted, os.strerror(errno.ENOSPC))


def _no_room(directory: Path, wanted: int, reason: str | None) -> ConfigError:
    free = shutil.disk_usage(directory).free
    return ConfigError(
        f"Not enough space for the optimizer state in parallel.offload_dir={directory}: it "
        f"requires {wanted:,} bytes, but {free:,} are free ({reason}). Free some space, choose a "
        "directory on a larger disk, or set parallel.offload=cpu."
    )


class Uploads:
    """Collective that all-gathers weights whose shards are in CPU memory.

    It copies this rank's shard to its place in the full weights, then gathers in place. On a GPU both run on
    a separate stream and overlap with compute.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, shard: Tensor, axis: MeshAxis, weights: Tensor) -> Pending:
        """Gather the full weights [size] from shards [size/shard], like `all_gather`."""
        own = weights.chunk(axis.size)[axis.rank]
        if self._stream is None:
            return all_gather(own.copy_(shard), axis, weights)
        # the memory of `weights` may just have been freed
        self._stream.wait_stream(torch.cuda.current_stream(weights.device))
        with torch.cuda.stream(self._stream):
            pending = all_gather(own.copy_(shard, non_blocking=True), axis, weights)
            done = self._stream.record_event()

        def finish() -> Tensor:
            torch.cuda.current_stream(weights.device).wait_event(done)
            return pending.wait()

        return Pending([], finish)


def pinned_zeros(counts: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device) -> list[Tensor]:
    """Return zeros in CPU memory, one tensor for each count of elements and dtype.

    For CUDA devices they are pinned, so that copies from them are asynchronous.
    """
    from megalite.system import pinned_memory

    sizes = [count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True)]
    pieces = pinned_memory.allocate(pinned_memory.piece_sizes(sizes), pinned=device.type == "cuda")
    places = pinned_memory.places(sizes, pieces)
    return [place.view(dtype).zero_() for place, dtype in zip(places, dtypes, strict=True)]
