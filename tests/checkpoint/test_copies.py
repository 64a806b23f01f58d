"""Which copies in memory the ranks of a run find, and what becomes of one that cannot be made."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from megalite.checkpoint import CheckpointError, copies, copy_server
from megalite.checkpoint.copies import Copies
from megalite.checkpoint.copy_server import TOKEN_BYTES, CopyServer, NodeFile
from megalite.mesh.mesh import Layout, Mesh
from tests.checkpoint import jobs_copies
from tests.support.pool import RankPool

NODES = ("a", "a", "b", "c")


def test_the_newest_whole_copy_of_one_job_is_found(ranks: RankPool, tmp_path: Path) -> None:
    """Node c has missed the second job, and keeps copies of the first."""
    ranks.run(4, jobs_copies.copy, tmp_path, NODES, (1, 2))
    ranks.run(4, jobs_copies.copy, tmp_path / "second", NODES, (3, 4))
    assert ranks.run(4, jobs_copies.found, tmp_path, NODES) == [[(2, ""), (1, "")]] * 4
    shutil.copytree(tmp_path / "second" / "c" / "step_00000004", tmp_path / "c" / "step_00000004")
    (lost,) = {tuple(each) for each in ranks.run(4, jobs_copies.found, tmp_path, NODES)}
    assert lost[0] == (4, "rank_00000.bin is on none of the 3 nodes") and lost[1] == (2, "")
    for node in "ab":
        shutil.copytree(tmp_path / "second" / node / "step_00000004", tmp_path / node / "step_00000004")
    mixed = ranks.run(4, jobs_copies.found, tmp_path, NODES)[0]
    assert mixed == [(step, "nodes have copies of several jobs") for step in (4, 2, 1)]
    shutil.rmtree(tmp_path / "b" / "step_00000002")
    shutil.move(tmp_path / "second" / "b" / "step_00000003", tmp_path / "b" / "step_00000002")
    assert ranks.run(4, jobs_copies.found, tmp_path, NODES)[0][1] == (2, "its nodes have different copies")
    for path in tmp_path.glob("*/step_00000001/rank_00003.bin"):
        os.truncate(path, path.stat().st_size - 128)
    assert ranks.run(4, jobs_copies.found, tmp_path, NODES)[0][2] == (1, "rank_00003.bin is on none of the 3 nodes")


@pytest.mark.parametrize("lost", ["", "a", "c"])
def test_every_rank_reads_the_bits_that_were_copied(lost: str, ranks: RankPool, tmp_path: Path) -> None:
    """Other ranks on other nodes, from their own and over the network; a changed byte is found."""
    ranks.run(4, jobs_copies.copy, tmp_path, NODES, (1,))
    if lost:
        shutil.rmtree(tmp_path / lost)
    assert ranks.run(3, jobs_copies.differing, tmp_path, ("c", "b", "a"), 20) == [[]] * 3
    for path in tmp_path.rglob("rank_00002.bin"):
        content = bytearray(path.read_bytes())
        content[10] ^= 1
        path.write_bytes(content)
    damages = [each for each in ranks.run(3, jobs_copies.differing, tmp_path, ("c", "b", "a"), 20) if each]
    assert damages and all("rank_00002.bin is damaged: expected checksum" in each[0] for each in damages)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_full_memory_leaves_the_copy_before(background: bool, ranks: RankPool, tmp_path: Path) -> None:
    """On every rank; the next copy is made again."""
    errors = ranks.run(4, jobs_copies.copy_with_full_memory, tmp_path, NODES, background)
    assert all(each == ["", "No space left on device", ""] for each in errors), errors
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"step_00000001", "step_00000003"}


def test_a_server_answers_only_its_job_and_only_files_of_copies(tmp_path: Path) -> None:
    (tmp_path / "step_00000007").mkdir()
    (tmp_path / "step_00000007" / "rank_00001.bin").write_bytes(b"0123456789")
    token = bytes(range(TOKEN_BYTES))
    server = CopyServer(tmp_path, token, timeout=20)
    address, read = ("127.0.0.1", server.port), bytearray(4)
    try:
        with NodeFile(address, token, 7, 1, timeout=20) as file:
            file.seek(3)
            assert file.readinto(read) == 4 and read == b"3456"
            file.seek(8)
            assert file.readinto(read) == 2 and read[:2] == b"89"
        with NodeFile(address, token, 7, 2, timeout=20) as file, pytest.raises(FileNotFoundError, match="rank_00002"):
            file.readinto(read)
        with NodeFile(address, bytes(TOKEN_BYTES), 7, 1, timeout=20) as file, pytest.raises(OSError):
            file.readinto(read)
    finally:
        server.close()
    with pytest.raises(OSError), socket.create_connection(address, timeout=5) as link:
        link.sendall(token)
        assert link.recv(1)


def test_a_server_outlives_errors_and_connections_without_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit for the answers of nodes, too."""
    accept, errors = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def failing(listener: socket.socket) -> object:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    monkeypatch.setattr(copy_server, "PAUSE_S", 0.01)
    monkeypatch.setattr(copy_server, "TOKEN_S", 0.05)
    token = bytes(range(TOKEN_BYTES))
    server = CopyServer(tmp_path, token, timeout=None)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as link:
            assert link.recv(1) == b"", "the server closes it"
        with NodeFile(("127.0.0.1", server.port), token, 7, 2, timeout=20) as file:
            time.sleep(0.2)  # longer than a token may take
            with pytest.raises(FileNotFoundError):
                file.readinto(bytearray(4))
    finally:
        server.close()
    assert not errors


def test_only_a_directory_of_this_user_alone_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and before each copy: others may write where it is, and can know its name."""
    mesh, checkpoints, place = Mesh(Layout()), tmp_path / "checkpoints", tmp_path / "copies"
    kept = checkpoints / "step_00000001" / "manifest.json"
    kept.parent.mkdir(parents=True)
    kept.touch()
    rejected = pytest.raises(CheckpointError, match="another user can write into it. Remove it, or set MEGALITE_COPIES")
    place.symlink_to(checkpoints)
    with rejected:
        Copies(place, mesh)
    place.unlink()
    used = Copies(place, mesh)
    assert place.stat().st_mode & 0o777 == 0o700
    place.rmdir()
    place.symlink_to(checkpoints)
    used.remove()
    error = used.begin(2, [], {}).error
    assert isinstance(error, CheckpointError) and "is a link" in str(error) and kept.exists()
    place.unlink()
    place.mkdir()
    place.chmod(0o770)
    with rejected:
        Copies(place, mesh)
    place.chmod(0o700)
    monkeypatch.setattr(copies.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with rejected:
        Copies(place, mesh)
