"""Copies of a run's state in memory that outlives its ranks, from which a restart resumes in seconds.

A copy has the format of a checkpoint. Every node has the files of its own ranks, and of the ranks of one
other node, its neighbor, in a directory in memory (tmpfs):

    DIRECTORY/step_00000100/          complete: every rank has said so
    DIRECTORY/.step_00000110.saving/  being made, or left by a killed run
        manifest.json                 the whole table, the same on every node
        rank_00000.bin                of this node's ranks and of the neighbor's

The previous copy stays until the next one is complete. A run that restarts, on any layout and any of the
nodes, reads the newest copy of which every file is on a node that is there. What another node has is read
from it over the network, one chunk at a time, with the checksums of a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, BinaryIO, cast

from megalite.checkpoint import tensors
from megalite.checkpoint.agreement import gathered, on_rank_0, raise_on_all_ranks
from megalite.checkpoint.checksummed_chunks import ALIGNMENT
from megalite.checkpoint.copy_server import TOKEN_BYTES, Address, CopyServer, NodeFile, folder
from megalite.checkpoint.directories import numbered
from megalite.checkpoint.errors import CheckpointError, damaged, reason
from megalite.checkpoint.manifest import Manifest, encode
from megalite.checkpoint.staging import Staging
from megalite.config import run_files
from megalite.mesh.mesh import Mesh
from megalite.parallel.spec import Rectangle
from megalite.system.addresses import own_address

PLACE_VARIABLE, PLACE = "MEGALITE_COPIES", Path("/dev/shm")
"""Environment variable: where the directories of copies are made, and where they are without it."""
DIRECTORY = "MEGALITE_KEPT_COPIES"
"""Environment variable: the directory of this node's copies, which a launcher keeps over its restarts."""
JOB = "job"
"""Key of the state of a copy: the job that has made it, the same over its restarts."""
KEPT = 2
"""Number of copies that are in memory while the next one is made, itself included."""
PIECE = 1 << 24  # bytes that are read from another node at a time


def directory_of(run: Path) -> Path:
    """Return the directory of the copies of a run on this node."""
    if kept := os.environ.get(DIRECTORY):
        return Path(kept)
    digest = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:12]
    return place() / f"megalite-{os.getuid()}-{digest}"


def place() -> Path:
    """Return where the directories of copies are made."""
    return Path(os.environ.get(PLACE_VARIABLE) or PLACE)


@dataclass
class Copy:
    """Timing and outcome of one copy on this rank.

    Attributes:
        started: value of `perf_counter` at its start.
        held: seconds for which it blocked training.
        complete: seconds from its start until every rank had it; 0 if it failed.
        bytes: number of bytes of all ranks.
        number: of complete copies in this start of the ranks, this one included.
        error: the reason why it is not complete, the same on every rank.
    """

    step: int
    started: float
    held: float = 0.0
    complete: float = 0.0
    bytes: int = 0
    number: int = 0
    error: Exception | None = None


@dataclass(frozen=True)
class FoundCopy:
    """A copy that some nodes have. It is usable, or has a problem."""

    step: int
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True)
class CopyManifest(Manifest):
    """The manifest of a copy, some of whose files are on other nodes.

    Attributes:
        elsewhere: the address of a node with the file, for files that this node does not have.
    """

    step: int = 0
    elsewhere: Mapping[str, Address] = field(default_factory=dict)
    token: bytes = b""
    timeout: float | None = None

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a file of the copy, here or on another node. Raises DamagedError."""
        if name not in self.elsewhere:
            with super().opened(name) as file:
                yield file
            return
        try:
            rank, address = tensors.rank_of(name), self.elsewhere[name]
            with NodeFile(address, self.token, self.step, rank, timeout=self.timeout) as remote:
                yield cast(BinaryIO, remote)
        except OSError as error:
            path, size = self.directory / name, f"{self.files[name]:,} bytes"
            raise damaged(path, size, f"none from {self.elsewhere[name][0]}: {reason(error)}") from None


@dataclass(frozen=True)
class _Announcement:
    """What a rank tells the others at its start.

    Attributes:
        copies: step → the last line of its manifest, and the sizes of the files that are there.
        address: of its server; None with one node.
    """

    host: str
    directory: str
    token: bytes
    job: str
    copies: dict[int, tuple[bytes, dict[str, int]]]
    address: Address | None = None

    @property
    def node(self) -> tuple[str, str]:
        return self.host, self.directory


class Copies:
    """The copies of a run, as one rank sees them. Collective.

    Args:
        directory: of this node's copies; ranks with the same directory on the same host are a node.
        background: whether `begin` returns when this rank's part is in staging memory; a thread makes the
            copy, and communicates through `mesh.copying`.
        timeout: seconds to wait for another node; None: no limit.

    Attributes:
        of_restart: whether the ranks continue a job, and may read its copies.
        resumed: the step of the copy from which this run has resumed; None: it has not.
        without_room: whether there is too little memory, so that none are made.

    Raises:
        CheckpointError: another user could write into the directory, or it cannot be made.
    """

    def __init__(
        self, directory: Path, mesh: Mesh, *, background: bool = False, timeout: float | None = None
    ):
        self.directory, self.mesh = directory, mesh
        self.of_restart = False
        self.resumed: int | None = None
        self.without_room = self._closed = False
        self._timeout = timeout
        self._thread: Thread | None = None
        self._staging = Staging() if background else None
        self._ended: list[Copy] = []
        self._complete = 0
        token = secrets.token_bytes(TOKEN_BYTES)
        self._announced = self._announce(token)
        self._token, self._job = self._announced[0].token, self._announced[0].job
        nodes: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, each in enumerate(self._announced):
            nodes[each.node].append(rank)
        self._nodes = list(nodes.values())
        self._server: CopyServer | None = None
        if len(self._nodes) > 1:
            self._server = CopyServer(directory, self._token, timeout)
            addresses = gathered((own_address(), self._server.port), mesh)
            self._announced = [
                replace(each, address=address)
                for each, address in zip(self._announced, addresses, strict=True)
            ]
        self._own = next(ranks for ranks in self._nodes if mesh.rank in ranks)
        self._neighbor = self._files_from_neighbor(mesh.rank)

    def _announce(self, token: bytes) -> list[_Announcement]:
        with raise_on_all_ranks(self.mesh, CheckpointError):
            self._claim()
            host = os.environ.get("NCCL_HOSTID") or os.uname().nodename
            copies = {
                step: _content(path)
                for step, path in numbered(self.directory).items()
                if (path / run_files.MANIFEST).exists()
            }
        job = secrets.token_hex(8)
        own = _Announcement(host, str(self.directory.absolute()), token, job, copies)
        return gathered(own, self.mesh)

    def _claim(self) -> None:
        """Make the directory, unless it is there. Its name can be known, and all users can write where it is.

        Raises:
            CheckpointError: it cannot be made, or is not one into which only this user can write.
        """
        way_out = f"Remove it, or set {PLACE_VARIABLE} to another directory in memory."
        try:
            with suppress(FileExistsError):
                self.directory.mkdir(parents=True, mode=0o700)
            if not self._is_own():
                raise CheckpointError(
                    f"{self.directory}, the directory for copies in memory, is a link, or another user can "
                    f"write into it. {way_out}"
                )
        except OSError as error:
            raise CheckpointError(
                f"could not make {self.directory}, the directory for copies in memory: {reason(error)}. "
                f"{way_out}"
            ) from None

    def _is_own(self) -> bool:
        """Whether the directory is one, no link to another, and only this user can write into it."""
        status = self.directory.lstat()
        writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not writable

    @property
    def leads_node(self) -> bool:
        """Whether this is the first rank of its node, which makes and removes its directories."""
        return self.mesh.rank == self._own[0]

    def _files_from_neighbor(self, rank: int) -> list[int]:
        """Return the ranks of the node before, a rank of whose node keeps their files as well."""
        if len(self._nodes) < 2:
            return []
        number = next(number for number, ranks in enumerate(self._nodes) if rank in ranks)
        before, own = self._nodes[number - 1], self._nodes[number]
        return [each for index, each in enumerate(before) if own[index % len(own)] == rank]

    # ---- found at a start

    def found(self) -> list[FoundCopy]:
        """Return the copies that an earlier start of the ranks has left, newest first. Collective."""
        steps = {step for each in self._announced for step in each.copies}
        copies = [self._found(step) for step in sorted(steps, reverse=True)]
        jobs = {copy.manifest.state[JOB] for copy in copies if copy.manifest is not None}
        if len(jobs) > 1:
            problem = "nodes have copies of several jobs"
            return [FoundCopy(copy.step, None, copy.problem or problem) for copy in copies]
        self._job = jobs.pop() if jobs else self._job
        return copies

    def _found(self, step: int) -> FoundCopy:
        places: dict[str, dict[int, _Announcement]] = defaultdict(dict)  # file → size → who has it
        holders = [rank for rank, each in enumerate(self._announced) if step in each.copies]
        own: bytes | None = None
        with suppress(OSError):
            if self.mesh.rank == holders[0]:
                own = (folder(self.directory, step) / run_files.MANIFEST).read_bytes()
        text = gathered(own, self.mesh)[holders[0]]
        if len({self._announced[rank].copies[step][0] for rank in holders}) > 1 or not text:
            return FoundCopy(step, None, "its nodes have different copies")
        for rank in holders:
            for name, size in self._announced[rank].copies[step][1].items():
                places[name].setdefault(size, self._announced[rank])
        here = self._announced[self.mesh.rank].copies.get(step, (b"", {}))[1]
        try:
            manifest = Manifest.parsed(text, folder(self.directory, step))
        except CheckpointError as error:
            return FoundCopy(step, None, str(error))
        elsewhere: dict[str, Address] = {}
        for name, size in manifest.files.items():
            if size not in places[name]:
                return FoundCopy(step, None, f"{name} is on none of {_counted_nodes(self._nodes)}")
            if here.get(name) != size:
                address = places[name][size].address
                assert address is not None, "a node that has what another one lacks has a server"
                elsewhere[name] = address
        whole = CopyManifest(
            manifest.directory,
            manifest.state,
            manifest.tensors,
            manifest.files,
            step=step,
            elsewhere=elsewhere,
            token=self._token,
            timeout=self._timeout,
        )
        return FoundCopy(step, whole)

    # ---- making a copy

    def room(self, rectangles: Sequence[Rectangle]) -> tuple[int, int]:
        """Return the bytes that the copies take on this rank's node, and those that it has. Collective."""
        own = sum(-(-part.tensor.nbytes // ALIGNMENT) * ALIGNMENT for part in rectangles)
        sizes = gathered(own, self.mesh)
        kept = [*self._own, *(each for rank in self._own for each in self._files_from_neighbor(rank))]
        taken = sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())
        return KEPT * sum(sizes[rank] for rank in kept), shutil.disk_usage(self.directory).free + taken

    def reserve(self, rectangles: Sequence[Rectangle]) -> None:
        """Allocate and touch the staging memory of copies in the background."""
        if self._staging is not None:
            self._staging.copied(rectangles)

    def begin(self, step: int, rectangles: Sequence[Rectangle], state: dict[str, Any]) -> Copy:
        """Start a copy of the current content of the rectangles, which may change once this returns.

        Collective. Errors are in the result of `take_ended`.

        Args:
            state: JSON data, stored as rank 0 passes it.
        """
        copy = Copy(step, perf_counter())
        self.wait()
        if self._staging is not None:
            given = copy, self._staging.copied(rectangles), state
            self._thread = Thread(target=self._make, args=given, daemon=True, name="copy")
            self._thread.start()
        else:
            self._make(copy, rectangles, state)
        copy.held = perf_counter() - copy.started
        return copy

    def wait(self) -> None:
        """Wait until no copy is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_ended(self) -> list[Copy]:
        """Return the copies that have ended since the last call, in order, successful or with an error."""
        ended = self._ended[:]
        del self._ended[: len(ended)]
        return ended

    def _make(self, copy: Copy, rectangles: Sequence[Rectangle], state: dict[str, Any]) -> None:
        mesh, over, fresh = self.mesh, self.mesh.copying, folder(self.directory, copy.step, unfinished=True)
        try:
            # every rank has the previous copy: the one before may go
            with raise_on_all_ranks(mesh, Exception, over):
                self._prepare(copy.step)
            outcomes = tensors.write(fresh, rectangles, mesh, over=over)
            content = {**state, JOB: self._job}
            text = on_rank_0(mesh, lambda: encode(content, tensors.merged(outcomes)), over)
            sizes = Manifest.parsed(text.encode(), fresh).files
            copy.bytes = sum(sizes.values())
            with raise_on_all_ranks(mesh, OSError, over):
                self._fetch(copy.step, sizes)
            with raise_on_all_ranks(mesh, OSError, over):
                self._publish(copy.step, text)
            copy.complete = perf_counter() - copy.started
            self._complete += 1
            copy.number = self._complete
        except Exception as error:  # reported by the caller of `take_ended`: this may run on the thread
            copy.error = error
            if self.leads_node:
                shutil.rmtree(fresh, ignore_errors=True)
        self._ended.append(copy)

    def _prepare(self, step: int) -> None:
        """Remove all but the newest copy, and what has been left of others."""
        if not self.leads_node:
            return
        self._claim()
        newest = max(numbered(self.directory), default=None)
        self._clear(None if newest == step else newest)
        folder(self.directory, step, unfinished=True).mkdir()

    def _fetch(self, step: int, sizes: Mapping[str, int]) -> None:
        """Copy the files of ranks of the node before to this one."""
        for rank in self._neighbor:
            if (size := sizes.get(tensors.file_name(rank), 0)) == 0:
                continue
            address = self._announced[rank].address
            assert address is not None
            path = folder(self.directory, step, unfinished=True) / tensors.file_name(rank)
            with (
                NodeFile(address, self._token, step, rank, unfinished=True, timeout=self._timeout) as source,
                open(path, "wb") as file,
            ):
                piece = bytearray(min(size, PIECE))
                while (rest := size - file.tell()) > 0:
                    view = memoryview(piece)[: min(rest, PIECE)]
                    if source.readinto(view) < len(view):
                        raise OSError(f"{source.name} has less than {size:,} bytes")
                    file.write(view)

    def _publish(self, step: int, text: str) -> None:
        if self.leads_node:
            fresh = folder(self.directory, step, unfinished=True)
            (fresh / run_files.MANIFEST).write_text(text, encoding="utf-8")
            fresh.rename(folder(self.directory, step))

    # ---- removing copies

    def remove(self, keep: int | None = None) -> None:
        """Remove the copies of this node, except that of the step `keep`, and once closed the directory."""
        self.wait()
        if self.leads_node:
            with suppress(FileNotFoundError):
                if self._is_own():
                    self._clear(keep)
            if self._closed:
                with suppress(OSError):
                    self.directory.rmdir()  # if it is empty

    def _clear(self, keep: int | None) -> None:
        for path in [*self.directory.glob("step_*"), *self.directory.glob(".step_*")]:
            if keep is None or path != folder(self.directory, keep):
                (path / run_files.MANIFEST).unlink(missing_ok=True)  # first: the rest is no copy
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Wait until no copy is in progress, and stop serving other nodes."""
        self.wait()
        self._closed = True
        if self._server is not None:
            self._server.close()


def _content(directory: Path) -> tuple[bytes, dict[str, int]]:
    """Return the end of the manifest of a copy, which has its checksum, and the sizes of its files."""
    end = (directory / run_files.MANIFEST).read_bytes()[-64:]
    return end, {path.name: path.stat().st_size for path in directory.glob("*.bin")}


def _counted_nodes(nodes: Sequence[object]) -> str:
    return f"the {len(nodes)} nodes" if len(nodes) > 1 else "this node"
