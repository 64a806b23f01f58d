"""What any set of ranks saves, any other set loads, bit for bit."""

from pathlib import Path

import pytest

from megalite import checkpoint
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.spec import Rectangle
from tests.checkpoint import jobs
from tests.support.pool import RankPool

TOTAL = sum(tensor.numel() for tensor in jobs.whole_tensors(0).values())
TOTAL_FLAT = sum(tensor.numel() for tensor in jobs.whole_tensors(0).values() if tensor.dim() in (1, 2))


@pytest.mark.parametrize("saved, loaded", [(1, (2, 8)), (2, (1, 3)), (3, (4, 2)), (4, (1, 8)), (8, (3, 4))])
def test_random_partitions(ranks: RankPool, tmp_path: Path, saved: int, loaded: tuple[int, ...]) -> None:
    for seed in range(4):
        ranks.run(saved, jobs.save, tmp_path / f"seed{seed}", seed, 10 + seed, {"seed": seed})
    for world in loaded:
        for seed in range(4):
            results = ranks.run(world, jobs.differing, tmp_path / f"seed{seed}", seed, 20 + seed)
            assert [wrong for _, wrong in results] == [[]] * world
            assert sum(count for count, _ in results) == TOTAL
    assert [checkpoint.manifest_of(tmp_path / f"seed{seed}").state["seed"] for seed in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("saved, loaded", [(3, 4), (8, 1), (1, 3)])
def test_flat_ranges_as_sharded_state_is_cut(ranks: RankPool, tmp_path: Path, saved: int, loaded: int) -> None:
    ranks.run(saved, jobs.save, tmp_path / "flat", 5, None, {})
    results = ranks.run(loaded, jobs.differing, tmp_path / "flat", 5, None)
    assert [wrong for _, wrong in results] == [[]] * loaded
    assert sum(count for count, _ in results) == TOTAL_FLAT


def test_only_files_that_hold_needed_slices_are_read(ranks: RankPool, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    ranks.run(2, jobs.save, directory, 5, None, {})
    needed = list(jobs.flat_rectangles(jobs.whole_tensors(5), 0, 2))
    (directory / "rank_00001.bin").unlink()  # what rank 1 wrote
    checkpoint.load(directory, needed)
    with pytest.raises(checkpoint.CheckpointError, match="rank_00001.bin"):
        checkpoint.load(directory, list(jobs.flat_rectangles(jobs.whole_tensors(5), 1, 2)))


def test_empty_rectangles_hide_no_real_ones(tmp_path: Path) -> None:
    """A rank whose share has no row of a tensor describes it at the offset at which the next rank's rows begin."""
    whole = jobs.whole_tensors(2)["weight/2"]
    boxes = [((0,), (5,)), ((5,), (0,)), ((5,), (12,)), ((17,), (0,))]
    checkpoint.save(
        tmp_path / "c", [Rectangle("w", (17,), box[0], jobs.cut(whole, box)) for box in boxes], {}, Mesh(Layout())
    )
    loaded = [Rectangle("w", (17,), box[0], jobs.cut(whole, box) * 0) for box in (((0,), (17,)), ((17,), (0,)))]
    checkpoint.load(tmp_path / "c", loaded)
    assert loaded[0].tensor.equal(whole)


def test_replicas_and_overlaps_load(tmp_path: Path) -> None:
    """Every rank fills all that it keeps, so one process may ask for the same elements more than once."""
    whole = jobs.whole_tensors(3)["weight/3"]
    mesh = Mesh(Layout())
    boxes = jobs.halves((0, 0), (5, 7), 0, 2)
    checkpoint.save(tmp_path / "c", [Rectangle("w", (5, 7), box[0], jobs.cut(whole, box)) for box in boxes], {}, mesh)
    boxes = [((0, 0), (5, 7)), ((1, 2), (3, 4)), ((1, 2), (2, 1)), ((0, 0), (5, 7))]
    loaded = [Rectangle("w", (5, 7), box[0], jobs.cut(whole, box) * 0) for box in boxes]
    checkpoint.load(tmp_path / "c", loaded)
    for part, box in zip(loaded, boxes, strict=True):
        assert part.tensor.equal(jobs.cut(whole, box)), box


def test_large_rectangles_are_cut_into_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors saved by one process, in pieces of at most 100 bytes wherever a row is not longer."""
    monkeypatch.setattr("megalite.checkpoint.tensors.LARGEST_CHUNK", 100)
    whole = {name: value for name, value in jobs.whole_tensors(4).items() if value.numel()}
    parts = [Rectangle(name, tuple(value.shape), (0,) * value.dim(), value) for name, value in whole.items()]
    checkpoint.save(tmp_path / "c", parts, {}, Mesh(Layout()))
    for name, stored in checkpoint.manifest_of(tmp_path / "c").tensors.items():
        longest = max(whole[name][0].nbytes if whole[name].dim() > 1 and len(whole[name]) > 1 else 0, 100)
        assert all(chunk.bytes <= longest for chunk in stored.chunks), name
        assert sum(chunk.bytes for chunk in stored.chunks) == whole[name].nbytes
        assert all(chunk.offset % 128 == 0 for chunk in stored.chunks)
    loaded = [Rectangle(part.name, part.global_shape, part.offsets, part.tensor * 0) for part in parts]
    checkpoint.load(tmp_path / "c", loaded)
    assert all(part.tensor.equal(whole[part.name]) for part in loaded)
