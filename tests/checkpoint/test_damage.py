"""A checkpoint that is damaged in any way is named, and the one before it is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, DamagedError
from megalite.checkpoint.checksummed_chunks import crc32c
from megalite.commands import train
from megalite.config.load import from_dict, to_dict
from megalite.mesh.mesh import Layout, Mesh
from megalite.training.trainer import Trainer
from tests.checkpoint.jobs import resume_from_each
from tests.checkpoint.test_publishing import save
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.jobs_training import train_and_save_each
from tests.support.pool import RankPool

CASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 2, "masked": False, "dropout": 0.0}
OLDER, NEWER = "step_00000002", "step_00000004"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoints/ of a run on two ranks, saved after steps 2 and 4."""
    config = configuration(prefix, tmp_path_factory.mktemp("runs"), 2)
    ranks.run(2, train_and_save_each, config, (2, 4))
    return Path(config["run"]["dir"]) / "damaged" / "checkpoints"


def configuration(prefix: str, directory: Path, dp: int, **changes: dict[str, Any]) -> dict[str, Any]:
    case = {**CASE, "dp": dp, "zero": int(dp > 1), "microbatches": 4 // dp}
    config = config_of(case, prefix, run={"dir": str(directory), "name": "damaged"}, checkpoint={"load": "auto"})
    return {section: {**values, **changes.get(section, {})} for section, values in config.items()}


def flipped(place: Callable[[int], int], bit: int) -> Callable[[Path], None]:
    """Changes one bit of the byte at `place(size)`."""

    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[place(len(data)) % len(data)] ^= 1 << bit
        file.write_bytes(data)

    return flip


def cut(count: Callable[[int], int]) -> Callable[[Path], None]:
    def truncate(file: Path) -> None:
        data = file.read_bytes()
        file.write_bytes(data[: count(len(data))])

    return truncate


def lengthened(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "empty": cut(lambda size: 0),
    "half": cut(lambda size: size // 2),
    "one byte short": cut(lambda size: size - 1),
    "one byte more": lengthened,
    "first byte": flipped(lambda size: 0, 0),
    "a third": flipped(lambda size: size // 3, 3),
    "the middle": flipped(lambda size: size // 2, 7),
    "two thirds": flipped(lambda size: 2 * size // 3, 5),
    "a digit": flipped(lambda size: size - 2, 1),
    "last byte": flipped(lambda size: size - 1, 6),
}
FILES = [f"{NEWER}/manifest.json", f"{NEWER}/rank_00000.bin", f"{NEWER}/rank_00001.bin"]


@pytest.fixture(scope="module")
def copies(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """A copy of the run's checkpoints for each file and damage."""
    copies = {}
    for number, (file, damage) in enumerate((file, damage) for file in (*FILES, "latest") for damage in DAMAGES):
        copy = tmp_path_factory.mktemp("copies") / str(number) / "damaged" / "checkpoints"
        shutil.copytree(saved, copy)
        DAMAGES[damage](copy / file)
        copies[file, damage] = copy
    return copies


@pytest.mark.parametrize("dp", [2, 1], ids=["the same ranks", "one process"])
def test_every_file_damaged_in_every_way(
    ranks: RankPool, prefix: str, copies: dict[tuple[str, str], Path], dp: int
) -> None:
    """Files of tensors and manifests: the older one is used, on all ranks. `latest`: what it names is, or was, is
    said."""
    directories = [str(copy.parent.parent) for copy in copies.values()]
    outcomes = ranks.run(dp, resume_from_each, configuration(prefix, Path(), dp), directories)
    assert outcomes[0] == outcomes[-1], "all ranks use the same"
    for (file, damage), (step, notes) in zip(copies, outcomes[0], strict=True):
        if file == "latest":
            assert step == 4 and ((damage in ("one byte short", "one byte more")) or "latest is damaged" in notes), (
                damage,
                notes,
            )
        else:
            assert step == 2, (file, damage)
            assert (
                str(copies[file, damage] / file) in notes
                or damage == "deleted"
                and f"{NEWER} is not a checkpoint" in notes
            ), notes
            assert f"continuing from {copies[file, damage] / OLDER}" in notes


def test_where_none_is_left_all_are_named_with_the_way_out(
    ranks: RankPool, prefix: str, saved: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(saved, tmp_path / "damaged" / "checkpoints")
    DAMAGES["the middle"](copy / OLDER / "rank_00001.bin")
    DAMAGES["half"](copy / NEWER / "rank_00000.bin")
    messages = [
        outcomes[0] for outcomes in ranks.run(2, resume_from_each, configuration(prefix, Path(), 2), [str(tmp_path)])
    ]
    assert messages[0] == messages[1]
    size = (saved / NEWER / "rank_00000.bin").stat().st_size
    for part in (
        f"could not find a usable checkpoint in {copy}",
        f"{copy / OLDER}/rank_00001.bin is damaged: expected checksum ",
        f"{copy / NEWER}/rank_00000.bin is damaged: expected {size:,} bytes, found {size // 2:,}",
        "start from step 0 by setting another run.name, or by setting checkpoint.load=none",
    ):
        assert part in messages[0][1]


def test_a_run_overwrites_the_damaged_one_when_it_comes_there_again(prefix: str, saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "damaged" / "checkpoints")
    DAMAGES["deleted"](copy / NEWER / "manifest.json")
    trainer = Trainer(from_dict(configuration(prefix, tmp_path, 1)), Mesh(Layout()))
    trainer.step()
    trainer.step()
    assert trainer.save() == copy / NEWER
    trainer.close()
    again = Trainer(from_dict(configuration(prefix, tmp_path, 1)), Mesh(Layout()))
    again.close()
    assert (again.step_done, again.notes) == (4, [])


def test_a_checkpoint_that_is_named_is_used_or_refused(
    prefix: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user sees it: one message, exit status 2."""
    copy = shutil.copytree(saved, tmp_path / "damaged" / "checkpoints") / NEWER
    DAMAGES["the middle"](copy / "rank_00000.bin")
    config = tmp_path / "config.yaml"
    import yaml

    config.write_text(
        yaml.safe_dump(to_dict(from_dict(configuration(prefix, tmp_path, 1, checkpoint={"load": str(copy)}))))
    )
    monkeypatch.setattr("sys.argv", ["pretrain.py", "--config", str(config)])
    with pytest.raises(SystemExit) as ended:
        train.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, len(err.splitlines())) == (2, "", 1)
    assert f"{copy}/rank_00000.bin is damaged: expected checksum " in err


def test_full_verification_finds_what_a_load_does_not_read(prefix: str, saved: Path, tmp_path: Path) -> None:
    """A warm start reads weights alone: damage of a moment is none of its business, unless every byte is to be
    checked."""
    copy = shutil.copytree(saved, tmp_path / "checkpoints") / NEWER
    chunk = next(
        tensor.chunks[0] for name, tensor in checkpoint.manifest_of(copy).tensors.items() if name.startswith("exp_avg/")
    )
    flipped(lambda size: chunk.offset, 4)(copy / chunk.file)
    for verify in ("read", "full"):
        changes = {"checkpoint": {"load": "none", "verify": verify}, "model": {"init_from": str(copy)}}
        config = from_dict(configuration(prefix, tmp_path / "fresh", 1, **changes))
        if verify == "read":
            Trainer(config, Mesh(Layout())).close()
        else:
            with pytest.raises(
                DamagedError,
                match=rf"{chunk.file} is damaged: expected checksum {chunk.crc32c} of bytes {chunk.offset:,} to",
            ):
                Trainer(config, Mesh(Layout()))


def test_shares_of_a_verification_are_the_whole(saved: Path) -> None:
    manifest = checkpoint.manifest_of(saved / NEWER)
    size = sum(file.stat().st_size for file in (saved / NEWER).glob("*.bin"))
    assert manifest.verify() == size == sum(manifest.verify(rank, 3) for rank in range(3))


def test_the_checksum_is_castagnolis() -> None:
    """RFC 3720, B.4."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(16)), bytes(range(16, 32))) == 0x46DD794E


def test_another_format_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    file = tmp_path / "step_00000001" / "manifest.json"
    body = file.read_text().replace('"format": 1', '"format": 2').rpartition(', "crc32c": ')[0]
    file.write_text(f'{body}, "crc32c": "{crc32c(body.encode()):08x}"}}\n')
    with pytest.raises(
        CheckpointError, match="has format version 2, but this version of megalite only supports 1"
    ) as error:
        checkpoint.manifest_of(file.parent)
    assert not isinstance(error.value, DamagedError)


# ---- what is kept


def kept(checkpoints: Path) -> list[int]:
    return sorted(checkpoint.step_number(path.name) or 0 for path in checkpoints.glob("*step_*"))


def test_the_newest_and_every_so_many_stay(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, step, float(step))
        checkpoint.prune(tmp_path, 2, Mesh(Layout()), keep_every=3)
    assert kept(tmp_path) == [3, 6, 7, 8]


@pytest.mark.parametrize("damage", ["deleted", "half", "one byte more"])
@pytest.mark.parametrize("file", ["manifest.json", "rank_00000.bin"])
def test_the_only_good_one_is_never_removed(tmp_path: Path, file: str, damage: str) -> None:
    """What a look at manifest and sizes shows to be damaged does not count, and goes once it is older than what
    counts."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step, float(step))
    for step in (3, 4):
        DAMAGES[damage](tmp_path / checkpoint.step_name(step) / file)
    checkpoint.prune(tmp_path, 1, Mesh(Layout()))
    assert kept(tmp_path) == [2, 3, 4]
    save(tmp_path, 5, 5.0)
    checkpoint.prune(tmp_path, 1, Mesh(Layout()))
    assert kept(tmp_path) == [5]
