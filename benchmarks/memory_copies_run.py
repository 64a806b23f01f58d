"""One rank of `benchmarks.memory_copies`: `python -m benchmarks.memory_copies_run SPEC.json`, under torchrun.

Timing starts after a barrier of all ranks, and ends when the last rank has finished. To restore includes
that the ranks find what there is, and read its manifest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.checkpoint_run import over_ranks, rectangles, warm_up, with_saver
from benchmarks.measure import finish, read_spec
from megalite import checkpoint
from megalite.checkpoint.copies import Copies
from megalite.checkpoint.saver import Saver
from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.spec import Rectangle

STEP = 1
Figures = dict[str, float]


class MeasuredCopies:
    """The state of this rank, and the ways to copy and to restore it."""

    def __init__(self, mesh: Mesh, disk: Path, memory: Path, own: list[Rectangle]):
        self.mesh, self.disk, self.memory, self.own = mesh, disk, memory, own
        self.dropped = ""

    def directory(self, nodes: int) -> Path:
        """Return the directory of this rank's node, if the ranks are this number of nodes."""
        return self.memory / f"{nodes}-{self.mesh.rank * nodes // self.mesh.world.size}"

    def copy(self, copies: Copies) -> Figures:
        copied = copies.begin(STEP, self.own, {})
        copies.wait()
        if copied.error is not None:
            raise copied.error
        return {"held_s": copied.held, "complete_s": copied.complete}

    def save(self) -> Figures:
        saver = Saver(self.mesh, CheckpointConfig())
        figures = with_saver(saver, self.mesh, self.disk, self.own)
        return {"held_s": figures["held_s"], "complete_s": figures["durable_s"]}

    def restore(self, directory: Path) -> Figures:
        """Restore from copies, of which those of this rank's node are in `directory`."""
        started = perf_counter()
        copies = Copies(directory, self.mesh)
        manifest = copies.found()[0].manifest
        assert manifest is not None
        return self._loaded(started, manifest, copies)

    def load(self) -> Figures:
        started = perf_counter()
        return self._loaded(
            started, checkpoint.manifest_of(self.disk / "checkpoints" / checkpoint.step_name(STEP))
        )

    def _loaded(self, started: float, manifest: checkpoint.Manifest, copies: Copies | None = None) -> Figures:
        into = [replace(part, tensor=torch.empty_like(part.tensor)) for part in self.own]
        checkpoint.load(manifest, into)
        seconds = perf_counter() - started
        assert all(torch.equal(one.tensor, other.tensor) for one, other in zip(into, self.own, strict=True))
        dist.barrier()  # another rank may read from this one
        if copies is not None:
            copies.close()
        return {"held_s": seconds, "complete_s": seconds}

    def drop_cache(self) -> None:
        """Drop the cached pages of all files or, where that is not permitted, those of the checkpoint."""
        if self.mesh.rank == 0:
            os.sync()
            try:
                Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
                self.dropped = "drop_caches"
            except OSError:
                self.dropped = "posix_fadvise"
                for path in self.disk.rglob("*.bin"):
                    with open(path, "rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()


def main() -> None:
    spec = read_spec()
    torch.set_num_threads(spec["threads"])
    dist.init_process_group("gloo")
    mesh = Mesh(Layout(dp=dist.get_world_size()), background=["copying"])
    own = rectangles(mesh, spec["matrices"], tuple(spec["shape"]))
    each = MeasuredCopies(mesh, Path(spec["disk"]), Path(spec["memory"]), own)
    warm_up(mesh, each.disk)
    seconds: dict[tuple[str, str], list[Figures]] = {}

    def measure(action: str, way: str, measured: Callable[[], Figures]) -> None:
        dist.barrier()
        figures = {key: over_ranks(value) for key, value in measured().items()}
        seconds.setdefault((action, way), []).append(figures)

    for _ in range(spec["rounds"]):
        measure("copy", "disk", each.save)
        for nodes, name in ((1, "one node"), (2, "two nodes")):
            for background, how in ((False, "at once"), (True, "in the background")):
                copies = Copies(each.directory(nodes), mesh, background=background)
                each.copy(copies)  # also of later copies, the staging memory is there
                measure("copy", f"{name}, {how}", partial(each.copy, copies))
                copies.close()
        each.drop_cache()
        measure("restore", "disk", each.load)
        measure("restore", "disk, cached", each.load)
        measure("restore", "memory of the node", lambda: each.restore(each.directory(2)))
        if mesh.rank >= mesh.world.size // 2:
            shutil.rmtree(each.directory(2), ignore_errors=True)
        measure("restore", "memory of another node", lambda: each.restore(each.directory(2)))
        dist.barrier()
        for path in (each.disk / "checkpoints", each.directory(1), each.directory(2)):
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
    size = sum(part.tensor.nbytes for part in own) * mesh.world.size
    ways = [(*key, figures) for key, figures in seconds.items()]
    finish(spec, {"bytes": size, "ways": ways, "dropped": each.dropped} if mesh.rank == 0 else None)


if __name__ == "__main__":
    main()
