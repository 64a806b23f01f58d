"""Uploads of a run to the object store that run.dir names, in the background.

A run writes to its spool, a local directory, as to any other run directory. Each rank uploads the file
that it has written of a checkpoint. Rank 0 then writes the manifest, which publishes the checkpoint, and
`latest`, and removes what was pruned. A store that fails delays uploads and not the run.

| | request | state after a kill |
|---|---|---|
| 1 | the files, each with a name that no other save uses, large ones in parts | the checkpoints of before |
| 2 | small files of the run: metrics.jsonl … | the same |
| 3 | the manifest, once every file that it names has its size | the new checkpoint |
| 4 | `latest`, if it is still what this run has written last | the new checkpoint, named |
| 5 | deletion of pruned checkpoints and of files of earlier saves, manifests first | the new checkpoint |

A checkpoint in the spool with a file `origin` is in the store. Its data here is freed when it is not the
newest any more. One without it waits for its upload, unless the run has resumed from an earlier step, and so
goes on without it: it is moved to checkpoints/unpublished, and never uploaded.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest
from megalite.config import run_files
from megalite.config.amounts import duration_seconds
from megalite.config.run_files import step_name, step_number
from megalite.config.schema import Config
from megalite.stores.arrival import write_state
from megalite.stores.errors import ConflictError, StoreError, reason
from megalite.stores.object_store import ObjectStore, patiently, store_of
from megalite.stores.stubs import Published, origin_of, published, remove_stub, write_origin
from megalite.system.messages import counted, say
from megalite.system.progress import amount

ABANDONED_S = 3600.0
"""Age from which files without a manifest belong to no save in progress."""
_CLOSING_S = 10.0
_POLL_S = 0.5
_SHARE = 20
"""The small files are uploaded at most for this fraction of the time."""
_NOT_UPLOADED = (run_files.CHECKPOINTS, run_files.OFFLOAD, run_files.LOCK, run_files.STORE_STATE)


def clean(config: Config) -> list[str]:
    """Discard what a killed job has left in the store: unfinished writes, and old files without a manifest.

    Rank 0 calls it before any rank uploads.

    Returns:
        a line for the user, or none.

    Raises:
        StoreError: the store cannot be reached, or has no such bucket.
    """
    url = config.run.url
    assert url is not None
    store, checkpoints = store_of(url), f"{url}/{run_files.CHECKPOINTS}"
    try:
        aborted = patiently(lambda: store.abort_uploads(url), url)
    except FileNotFoundError as error:
        raise StoreError(
            f"run.dir: the bucket of {url} does not exist ({reason(error)}). Create it, or correct run.dir."
        ) from error
    listing = patiently(lambda: published(store, checkpoints), url)
    now = max((each.modified for each in listing.objects.values()), default=0.0)  # by the clock of the store
    waiting = {path.name for path in _waiting(config.run.directory)}
    orphans = [
        f"{checkpoints}/{name}"
        for name, each in listing.objects.items()
        if (number := step_number(step := name.partition("/")[0])) is not None
        and number not in listing.steps
        and step not in waiting
        and each.modified < now - ABANDONED_S
    ]
    patiently(lambda: store.delete(orphans), url)
    return [f"{url}: discarded {counted(aborted, 'unfinished upload')} of an earlier job"] if aborted else []


def _set_aside(path: Path, step: int) -> None:
    """Move a checkpoint that the run goes on without to where nothing is uploaded, resumed or pruned."""
    place = path.with_name(run_files.UNPUBLISHED) / path.name
    place.parent.mkdir(exist_ok=True)
    remove_stub(place)
    with suppress(FileNotFoundError):  # moved by another node that has the same spool
        path.rename(place)
        say(f"{path} was not uploaded, and the run goes on from step {step} without it: moved to {place}")


def _waiting(directory: Path) -> list[Path]:
    """Return the checkpoints in a spool that are not known to be in the store, oldest save first."""
    paths = [
        path
        for path in (directory / run_files.CHECKPOINTS).glob("step_*")
        if step_number(path.name) is not None
        and (path / run_files.MANIFEST).exists()
        and origin_of(path) is None
    ]
    return sorted(paths, key=lambda path: ((path / run_files.MANIFEST).stat().st_mtime, path.name))


class RunUploads:
    """The uploads of one rank, by a thread.

    Args:
        rank: rank 0 publishes.
        leads_node: whether this is the first rank of its node, which uploads what an earlier job has left
            here, and frees space in the spool.

    Attributes:
        uploading: the checkpoint that is being uploaded. It must not be pruned, or nothing would ever be in
            the store if saves follow each other faster than uploads.
    """

    def __init__(self, config: Config, rank: int, leads_node: bool = True):
        assert config.run.url is not None
        self.url, self.directory = config.run.url, config.run.directory
        self._rank, self._leads_node, self._options = rank, leads_node, config.store
        self._checkpoints = f"{self.url}/{run_files.CHECKPOINTS}"
        self._files = RunFiles(self.directory, self.url, self._part_bytes, new=rank > 0)
        self.uploading: Path | None = None
        self._queue: dict[Path, int] = {}  # checkpoints of which this rank has something to do → their save
        self._of_earlier_job: set[Path] = set()
        self._removed: list[str] = []
        self._latest: str | None = None  # the tag of `latest` in the store, as this run knows it
        self._unconfirmed: int | None = None
        self._saves, self._last_size, self._published_own = 0, 0, False
        self._conflict: ConflictError | None = None
        self._problem: str | None = None  # why the last attempt failed
        self._changed, self._awake = Condition(), True
        self._stop = self._requested = self._began = False
        self._thread: Thread | None = None

    @property
    def _part_bytes(self) -> int:
        return int(self._options.part_mb * 1e6)

    @property
    def _local(self) -> Path:
        return self.directory / run_files.CHECKPOINTS

    def start(self, step: int) -> None:
        """Start the thread, with what an earlier job has left in the spool.

        Args:
            step: that of the checkpoint from which the run goes on. What was saved at later ones is not
                of this run any more.
        """
        if self._leads_node:
            for path in _waiting(self.directory):
                if (step_number(path.name) or 0) > step:
                    _set_aside(path, step)
            self._of_earlier_job = set(_waiting(self.directory))
            self._queue = dict.fromkeys(_waiting(self.directory), 0)
        self._thread = Thread(target=self._run, daemon=True, name="uploads")
        self._thread.start()

    # ---- called by the run

    def check(self) -> None:
        """Raise CheckpointError if another save cannot be taken. Called on rank 0 before each."""
        if self._conflict is not None:
            raise CheckpointError(str(self._conflict))
        if self._options.spool_gb is None:
            return
        waiting = sum(_bytes_of(path) for path in _waiting(self.directory))
        if waiting and waiting + self._last_size > self._options.spool_gb * 1e9:
            raise CheckpointError(
                f"store.spool_gb = {self._options.spool_gb:g} is reached: {amount(waiting, 'B')} of "
                f"checkpoints in {self._local} wait for {self.url}"
                + (f", which fails ({self._problem})." if self._problem else ".")
                + " Raise store.spool_gb, or save less often."
            )

    def saved(self, directory: Path, removed: Sequence[str] = ()) -> None:
        """Upload a checkpoint that is complete in the spool, and remove others. Called on every rank."""
        with self._changed:
            self._saves += 1
            self._queue = {
                path: save for path, save in self._queue.items() if path != directory and path.exists()
            }
            self._queue[directory] = self._saves
            self._of_earlier_job.discard(directory)
            if self._leads_node:
                names = {*self._removed, *removed} - {directory.name}
                self._removed = sorted(names)
            self._last_size = _bytes_of(directory)
            self._wake()

    def wait(self) -> None:
        """Wait until everything is in the store, at most for `store.final_wait`.

        Raises:
            CheckpointError: it is not. It stays in the spool.
        """
        end = time.monotonic() + (duration_seconds(self._options.final_wait) or 0)
        with self._changed:
            self._requested = True
            self._wake()
            while self._left() and self._conflict is None and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            names, why = [path.name for path in self._queue], self._problem
        if self._conflict is not None:
            raise CheckpointError(str(self._conflict))
        if names or why:
            what = f"{', '.join(names)} of {self._local}" if names else f"{self.directory}"
            raise CheckpointError(
                f"{what} could not be uploaded to {self.url} within store.final_wait = "
                f"{self._options.final_wait}"
                + (f" ({why})" if why else "")
                + ". It stays there: repeat the command on this machine to upload it."
            )

    def close(self) -> None:
        """Upload the small files a last time, if the store answers, and end the thread."""
        with self._changed:
            self._stop = True
            self._wake()
        if self._thread is not None:
            self._thread.join(_CLOSING_S)
            self._thread = None

    def _wake(self) -> None:
        self._awake = True
        self._changed.notify_all()

    def _left(self) -> bool:
        return bool(self._queue or self._removed or self._requested)

    # ---- the thread

    def _run(self) -> None:
        pause, longest = 0.0, float(duration_seconds(self._options.retry) or 1)
        interval = float(duration_seconds(self._options.interval) or 1)
        next_files = time.monotonic() + interval
        while not self._stop:
            with self._changed:
                idle = max(0.0, next_files - time.monotonic())
                self._changed.wait_for(lambda: self._awake, pause or (_POLL_S if self._queue else idle))
                self._awake = False
            try:
                if not self._stop:
                    self._round()
                if self._leads_node and (self._stop or self._requested or time.monotonic() >= next_files):
                    next_files = time.monotonic() + max(interval, _SHARE * self._files.upload())
                self._requested = False
                self._answered()
                pause = 0.0
            except ConflictError as error:
                self._conflict, self._stop = error, True
                say(f"{error} Checkpoints of this job stay in {self._local}")
            except Exception as error:  # each library has errors of its own
                self._failed(error)
                pause = min(max(2 * pause, _POLL_S), longest)
            with self._changed:
                self._changed.notify_all()

    def _answered(self) -> None:
        if self._problem is not None:
            say(f"{self.url} answers again")
        self._problem = None

    def _failed(self, error: Exception) -> None:
        if self._problem is None:
            say(
                f"{self.url}: {reason(error)}. The run goes on; checkpoints stay in {self._local} and are "
                "uploaded when the store answers"
            )
        self._problem = reason(error)

    def _round(self) -> None:
        """Do what can be done now. Raises what the store raises."""
        store = store_of(self.url)
        if not self._began and self._rank == 0:
            latest = store.info(f"{self._checkpoints}/{run_files.LATEST}")
            self._latest = None if latest is None else latest.tag
            self._name_latest(store)  # a job may have been killed before it
        self._began = True
        done = 0
        for directory, save in list(self._queue.items()):
            self.uploading = directory
            if self._handle(store, directory):
                done += 1
                with self._changed:
                    if self._queue.get(directory) == save:
                        del self._queue[directory]
        self.uploading = None
        if self._removed and (done or not self._queue):
            self._remove(store)

    def _handle(self, store: ObjectStore, directory: Path) -> bool:
        """Upload what this rank has of a checkpoint, and publish it on rank 0. Return whether that is all."""
        try:
            manifest = Manifest.of(directory)
            content = (directory / run_files.MANIFEST).read_bytes()
        except (CheckpointError, FileNotFoundError):
            return True  # it was pruned
        if origin_of(directory) is not None:
            return True
        url, started = f"{self._checkpoints}/{directory.name}", time.monotonic()
        if not self._upload_data(store, directory, manifest, url):
            return False
        if not self._leads_node:
            return True
        there = store.find(url)
        if any(name not in there or there[name].size != size for name, size in manifest.files.items()):
            return self._is_given_up(directory)
        if self._rank == 0:
            self._files.upload()  # the steps of a published checkpoint have their lines in metrics.jsonl
            if not self._is_still(directory, content):
                return False
            self._publish(store, directory, content, url)
            size, taken = sum(manifest.files.values()), time.monotonic() - started
            say(f"uploaded {url} ({amount(size, 'B')}, {taken:.1f} s)")
            others = [name for name in store.find(url) if name not in {*manifest.files, run_files.MANIFEST}]
            if self._is_still(directory, content):  # else the step has been saved again, with other files
                store.delete([f"{url}/{name}" for name in others])
        else:
            entry = there.get(run_files.MANIFEST)
            if entry is None or store.read(f"{url}/{run_files.MANIFEST}") != content:
                return self._is_given_up(directory)
            write_origin(directory, url, entry.tag)
        self._published_own |= directory not in self._of_earlier_job
        self._free()
        return True

    def _upload_data(self, store: ObjectStore, directory: Path, manifest: Manifest, url: str) -> bool:
        """Upload the files of this rank, or all of an earlier job. Return whether they were still there."""
        earlier, there = directory in self._of_earlier_job, store.find(url)
        for name, size in manifest.files.items():
            path, known = directory / name, there.get(name)
            own = name.startswith(f"rank_{self._rank:05d}") or (self._leads_node and earlier)
            if not own or not path.exists() or (known is not None and known.size == size):
                continue
            try:
                store.upload(path, f"{url}/{name}", self._part_bytes)
            except FileNotFoundError:
                if path.exists():
                    raise
                return False  # pruned, or saved again
        return True

    @staticmethod
    def _is_still(directory: Path, content: bytes) -> bool:
        with suppress(FileNotFoundError):
            return (directory / run_files.MANIFEST).read_bytes() == content
        return False

    def _is_given_up(self, directory: Path) -> bool:
        """Return whether not to wait for other nodes: they have lost their part of an earlier job's
        checkpoint, or rank 0 has pruned it before it was published.
        """
        pruned = self._rank > 0 and directory.name in self._removed
        if not (pruned or directory in self._of_earlier_job) or not self._published_own:
            return False
        if not pruned:
            say(f"{directory} was not uploaded, because a part of it is on no node of this job")
        remove_stub(directory)
        return True

    def _publish(self, store: ObjectStore, directory: Path, content: bytes, url: str) -> None:
        """Write the manifest, then `latest`, then `best`."""
        manifest = f"{url}/{run_files.MANIFEST}"
        self._check_latest(published(store, self._checkpoints), store)
        store.write(manifest, content)
        self._name_latest(store)
        if (entry := store.info(manifest)) is not None and self._is_still(directory, content):
            write_origin(directory, url, entry.tag)
        best = self._local / run_files.BEST
        if best.is_file() and best.read_text(encoding="utf-8").strip() == directory.name:
            store.write(f"{self._checkpoints}/{run_files.BEST}", best.read_bytes())

    def _check_latest(self, listing: Published, store: ObjectStore) -> None:
        """Raise ConflictError if another job has written `latest`."""
        latest = listing.objects.get(run_files.LATEST)
        if latest is not None and self._unconfirmed is not None and self._unconfirmed == listing.newest:
            self._latest = latest.tag  # the answer to our write was lost
        self._unconfirmed = None
        if store.conditional and (None if latest is None else latest.tag) != self._latest:
            raise ConflictError(
                f"{self._checkpoints}/{run_files.LATEST} has been written by another process."
            )

    def _name_latest(self, store: ObjectStore) -> None:
        """Let `latest` in the store name the newest published checkpoint up to that of the spool."""
        listing, file = published(store, self._checkpoints), self._local / run_files.LATEST
        self._check_latest(listing, store)
        own = step_number(file.read_text(encoding="utf-8").strip()) if file.is_file() else None
        number = max((step for step in listing.steps if own is None or step <= own), default=None)
        if number is None:
            return
        if store.conditional and (number != listing.newest or run_files.LATEST not in listing.objects):
            text = f"{step_name(number)}\n".encode()
            self._unconfirmed = number
            self._latest = store.replace(f"{self._checkpoints}/{run_files.LATEST}", text, self._latest)
            self._unconfirmed = None
        write_state(self.directory, self._latest or listing.token)

    def _remove(self, store: ObjectStore) -> None:
        """Delete pruned checkpoints, manifests first, oldest first.

        The store keeps as many published checkpoints as the spool has, uploaded or not: those that are to
        replace the pruned ones may not be in the store yet.
        """
        waiting = {path.name for path in self._queue}
        names = [name for name in self._removed if name not in waiting]
        for name in names:  # on a node whose disk rank 0 does not see, or because it was in use
            if origin_of(self._local / name) is not None:  # else it has been saved again
                remove_stub(self._local / name)
        if self._rank == 0:
            names = self._removed_in_store(store, names)
        with self._changed:
            # if nothing waits, the store has no more than what the spool has: there is nothing to delete
            self._removed = [name for name in self._removed if name not in names] if self._queue else []

    def _removed_in_store(self, store: ObjectStore, names: Sequence[str]) -> list[str]:
        listing = published(store, self._checkpoints)
        there, kept, removed = set(listing.steps), len(list(self._local.glob("step_*"))), list[str]()
        for name in names:
            number, url = step_number(name), f"{self._checkpoints}/{name}"
            present = [file for file in store.find(url) if file != run_files.MANIFEST]
            if (self._local / name / run_files.MANIFEST).exists():
                continue  # it has been saved again: what is listed may be of that save
            if number in there:
                if len(there) <= kept or number == listing.newest:
                    continue
                store.delete([f"{url}/{run_files.MANIFEST}"])
                there.discard(number)
            store.delete([f"{url}/{file}" for file in present])
            removed.append(name)
        return removed

    def _free(self) -> None:
        """Remove the data of uploaded checkpoints from the spool, except that of the newest."""
        with suppress(OSError):
            newest = (self._local / run_files.LATEST).read_text(encoding="utf-8").strip()
            for path in self._local.glob("step_*"):
                if path.name != newest and origin_of(path) is not None:
                    for file in path.glob("rank_*.bin"):
                        file.unlink(missing_ok=True)


def _bytes_of(directory: Path) -> int:
    with suppress(OSError):
        return sum(file.stat().st_size for file in directory.glob("*.bin"))
    return 0


class RunFiles:
    """The files of a run besides its checkpoints, which are uploaded again when they have changed.

    Args:
        new: upload only what changes from now on; otherwise also what is there.
    """

    def __init__(self, directory: Path, url: str, part_bytes: int, new: bool = False):
        self._directory, self._url, self._part_bytes = directory, url, part_bytes
        self._uploaded = dict(self._present()) if new else dict[str, tuple[int, int]]()

    def upload(self) -> float:
        """Upload what has changed, and return the seconds that it took. Raises what the store raises."""
        started, store = time.monotonic(), store_of(self._url)
        present = dict(self._present())
        for name, status in present.items():
            if self._uploaded.get(name) != status:
                try:
                    store.upload(self._directory / name, f"{self._url}/{name}", self._part_bytes)
                except FileNotFoundError:
                    if (self._directory / name).exists():
                        raise
                else:
                    self._uploaded[name] = status
        gone = [name for name in self._uploaded if name not in present]
        store.delete([f"{self._url}/{name}" for name in gone])
        for name in gone:
            del self._uploaded[name]
        return time.monotonic() - started

    def _present(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the files with their sizes and times; hidden ones are being written."""
        for place, folders, files in os.walk(self._directory):
            base = Path(place).relative_to(self._directory)
            left_out = set() if base.parts else set(_NOT_UPLOADED)
            for names in (folders, files):  # os.walk enters what stays among the folders
                names[:] = sorted(name for name in names if name not in left_out and not name.startswith("."))
            for name in files:
                with suppress(FileNotFoundError):
                    status = (self._directory / base / name).stat()
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    yield (base / name).as_posix(), (status.st_size, status.st_mtime_ns)
