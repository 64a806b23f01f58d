"""Where optimizer state lives, and how a step reaches it: beside the weights, in CPU memory, or in a memory-mapped file.

Optimizer state is what AdamW keeps for this rank's owned ranges: both moments, and the master weights where they are not the weights
themselves. In every place it is ordinary tensors, so initialisation and checkpoints need not know where. Only a step goes by windows:

    copy      the next window's gradients come to pinned memory, and the disk reads its pages ahead
    update    this window's masters and moments, on the CPU
    copy      the window's new weights go back in compute precision, and the disk's pages leave memory

Two staging buffers each way let the copies of neighbouring windows run beside an update (Ren et al. 2021, ZeRO-Offload; Rajbhandari et
al. 2021, ZeRO-Infinity). On a CPU nothing has to be copied. No communication, but for `Uploads`, which gathers ZeRO-3's weights.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import torch
from torch import Tensor

from megalite.config.schema import ConfigError
from megalite.mesh import MeshAxis
from megalite.parallel.collectives import Pending, all_gather

WINDOW = 1 << 20  # elements, a multiple of 64 so that no rounding changes: 12 MiB of fp32 masters and moments
MADV_POPULATE_WRITE = 23  # Linux 5.14; missing in Python's mmap


class OffloadError(RuntimeError):
    """Offloaded optimizer state can not be read or written any more; the message names the directory and the reason."""


@dataclass(frozen=True)
class StateRange:
    """A range of a bucket that one optimizer call updates: tensors of one length."""

    decays: bool
    weights: Tensor  # compute precision, what the model reads
    grads: Tensor
    master: Tensor  # at least fp32; the weights themselves where those are as wide and lie where the state lies
    state: Sequence[Tensor]  # what the optimizer keeps, in the order of its kinds

    @property
    def separate(self) -> bool:
        """Whether the master weights are a copy."""
        return self.weights.data_ptr() != self.master.data_ptr()

    def cut(self, size: int) -> Iterator[StateRange]:
        """Pieces of at most `size` elements."""
        tensors = (self.weights, self.grads, self.master, *self.state)
        for weights, grads, master, *state in zip(*(tensor.split(size) for tensor in tensors), strict=True):
            yield StateRange(self.decays, weights, grads, master, state)


class StateMemory:
    """Optimizer state beside the weights, on their device."""

    def __init__(self, device: torch.device):
        self.device = device

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Room for `count` elements of state."""
        return torch.zeros(count, dtype=dtype, device=self.device)

    def windows(self, ranges: Sequence[StateRange]) -> Iterator[list[StateRange]]:
        """Parts of the ranges, all of them once, to update with one call each, masters and weights, before the next is asked for.

        Here at most two parts: what decays and what does not.
        """
        for decays in (True, False):
            if group := [each for each in ranges if each.decays is decays]:
                yield group

    def place_of(self, tensor: Tensor) -> str:
        """Where a tensor lies: cuda, cpu or disk."""
        return tensor.device.type

    def release(self, tensor: Tensor | None = None) -> None:
        """Give back memory that was taken by touching a tensor of state, or all of them, in other ways than through windows."""

    def sync(self) -> None:
        """Return when what has been written is safe to read. Raises OffloadError where it is not."""


class CPUState(StateMemory):
    """Optimizer state in CPU memory, updated there."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._staging: _Staging | None = None

    def windows(self, ranges: Sequence[StateRange]) -> Iterator[list[StateRange]]:
        """One after the other; while one is updated, the next one's gradients and pages come and the last one's weights go."""
        cut = [window for each in ranges for window in each.cut(WINDOW)]
        if self._staging is None and cut and cut[0].grads.is_cuda:
            self._staging = _Staging(cut[0].grads, cut[0].weights)
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
        """Start bringing what will be needed next."""
        if self._staging is not None:
            self._staging.fetch(index, window.grads)

    def _load(self, index: int, window: StateRange) -> StateRange:
        """The window, all of it in CPU memory."""
        if self._staging is None:
            return window
        weights = self._staging.room(index, window.weights) if window.weights.is_cuda else window.weights
        return replace(window, grads=self._staging.fetched(index, window.grads), weights=weights)

    def _unload(self, index: int, window: StateRange) -> None:
        """Bring the updated weights to where the model reads them; the window is done with."""
        if window.weights.is_cuda:
            assert self._staging is not None
            self._staging.send(index, window.weights)


class _Staging:
    """Pinned memory between a GPU and the optimizer on the CPU: two buffers each way, so that a copy runs beside an update."""

    def __init__(self, grads: Tensor, weights: Tensor):
        self._grads, self._weights = (
            [torch.empty(WINDOW, dtype=tensor.dtype, pin_memory=True) for _ in range(2)] for tensor in (grads, weights)
        )
        self._device = grads.device
        self._incoming, self._outgoing = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._arrived, self._left = ([torch.cuda.Event(), torch.cuda.Event()] for _ in range(2))

    def begin(self) -> None:
        """Copies wait for what the GPU has been given so far: then gradients are complete, and nobody reads the old weights any more."""
        for stream in (self._incoming, self._outgoing):
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, index: int, grads: Tensor) -> None:
        """Start copying a window's gradients; the window two before it must be done with its own."""
        with torch.cuda.stream(self._incoming):
            self._grads[index % 2][: grads.numel()].copy_(grads, non_blocking=True)
            self._arrived[index % 2].record()

    def fetched(self, index: int, grads: Tensor) -> Tensor:
        """The copy of a window's gradients."""
        self._arrived[index % 2].synchronize()
        return self._grads[index % 2][: grads.numel()]

    def room(self, index: int, weights: Tensor) -> Tensor:
        """Where a window's new weights are to be written: what was there has left."""
        self._left[index % 2].synchronize()
        return self._weights[index % 2][: weights.numel()]

    def send(self, index: int, weights: Tensor) -> None:
        """Start copying a window's new weights to where the model reads them."""
        with torch.cuda.stream(self._outgoing):
            weights.copy_(self._weights[index % 2][: weights.numel()], non_blocking=True)
            self._left[index % 2].record()

    def end(self) -> None:
        """What the GPU is given from now on sees the new weights."""
        torch.cuda.current_stream(self._device).wait_stream(self._outgoing)


class DiskState(CPUState):
    """Optimizer state in a mapped file of this process, of which windows alone are in memory.

    The file has no name, so whatever ends the process removes it. Its room is reserved when a tensor is made: a full disk is an error
    then, not a bus error later. Pages that were given back stay in the kernel's cache while it has room; it writes them when it likes.

    Raises:
        ConfigError: where the directory can not hold the file.
    """

    def __init__(self, directory: Path):
        super().__init__()
        self.directory = directory
        self.file = _open(directory)
        self._mappings: dict[int, mmap.mmap] = {}  # by address: advice must never reach other memory, whose content it would drop

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        size, start = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE, os.fstat(self.file.fileno()).st_size
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
        """Also what the kernel could not write since the file was made: it would be read back wrong."""
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
        """Tell the kernel about the pages of a tensor, if they are this file's; DONTNEED on a shared mapping loses nothing."""
        mapping = self._mappings.get(tensor.untyped_storage().data_ptr())
        if mapping is None:
            return
        start = int(tensor.storage_offset()) * tensor.itemsize
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            mapping.madvise(advice, first, start + int(tensor.nbytes) - first)
        except OSError as error:  # populating reports what touching the page would end the process for
            if error.errno != errno.EINVAL or advice != MADV_POPULATE_WRITE:  # an older kernel: pages come as they are touched
                raise self._lost(error) from error

    def _lost(self, error: OSError) -> OffloadError:
        reason = "its pages can not be read from, or reserved on, the disk" if error.errno == errno.EFAULT else error.strerror
        return OffloadError(
            f"parallel.offload_dir = {self.directory}: the file with the optimizer state is damaged: {reason}. "
            "Nothing of that was saved. Start again with another directory, or parallel.offload cpu, from the newest checkpoint."
        )


def state_memory(offload: str, device: torch.device, directory: Path) -> StateMemory:
    """The memory that `parallel.offload` names; `directory` is for disk."""
    if offload == "none":
        return StateMemory(device)
    return CPUState() if offload == "cpu" else DiskState(directory)


def check_directory(directory: Path, wanted: int) -> None:
    """Make a directory, and raise ConfigError where files of `wanted` bytes can not lie in it."""
    _open(directory).close()
    _check_room(directory, wanted)


def _open(directory: Path) -> IO[bytes]:
    """A new file without a name."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return TemporaryFile(dir=directory)
    except OSError as error:
        raise ConfigError(
            f"parallel.offload_dir = {directory} can not be written: {error.strerror}. "
            "Give a directory on a local disk that can, or set parallel.offload to cpu."
        ) from None


def _check_room(directory: Path, wanted: int) -> None:
    if wanted > shutil.disk_usage(directory).free:
        raise _no_room(directory, wanted, os.strerror(errno.ENOSPC))


def _no_room(directory: Path, wanted: int, reason: str | None) -> ConfigError:
    free = shutil.disk_usage(directory).free
    return ConfigError(
        f"parallel.offload_dir = {directory} has no room for the optimizer state: {wanted:,} bytes are wanted, {free:,} are free "
        f"({reason}). Free as much, give a directory on a larger disk, or set parallel.offload to cpu."
    )


class Uploads:
    """Gathers weights whose shards lie in CPU memory: this rank's goes to its place among the whole weights, then all ranks' are gathered.

    On a GPU both are on a stream of their own, beside what computes.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, shard: Tensor, axis: MeshAxis, weights: Tensor) -> Pending:
        """As `all_gather`."""
        own = weights.chunk(axis.size)[axis.rank]
        if self._stream is None:
            return all_gather(own.copy_(shard), axis, weights)
        self._stream.wait_stream(torch.cuda.current_stream(weights.device))  # the memory of `weights` may just have been freed
        with torch.cuda.stream(self._stream):
            pending = all_gather(own.copy_(shard, non_blocking=True), axis, weights)
            done = self._stream.record_event()

        def finish() -> Tensor:
            torch.cuda.current_stream(weights.device).wait_event(done)
            return pending.wait()

        return Pending([], finish)


def pinned_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """CPU memory that a device copies from by itself."""
    return torch.zeros(count, dtype=dtype, pin_memory=device.type == "cuda")
