"""Checkpoints in a store, and the local directories that stand for them.

A checkpoint is published when its manifest is in the store: the manifest is written last and deleted
first, and names only objects that are complete. `latest` names the newest one. Where it is missing,
because the store cannot replace an object on a condition or the run was killed before its first update,
the manifest that was written last is the newest.

A stub is a local directory with the manifest and a file `origin`, the URL of the checkpoint and the tag of
its manifest. Data is read from the store where the stub has no file of that name, so whatever reads
checkpoints reads stubs as well.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megalite.config import run_files
from megalite.config.run_files import step_name, step_number
from megalite.stores.errors import StoreError
from megalite.stores.object_store import ObjectStore, StoredObject, patiently, store_of
from megalite.stores.url import cache_directory, local, normal


@dataclass(frozen=True)
class Published:
    """The checkpoints/ of a run in a store.

    Attributes:
        objects: all objects below it, those of saves in progress included, by the rest of their names.
        steps: the manifests of published checkpoints, by step.
        newest: the step to resume from; None if there is none.
        best: the step that `best` names, if it is published.
    """

    url: str
    objects: dict[str, StoredObject]
    steps: dict[int, StoredObject]
    newest: int | None
    best: int | None

    @property
    def token(self) -> str:
        """Changes with every checkpoint that becomes the newest."""
        if (latest := self.objects.get(run_files.LATEST)) is not None:
            return latest.tag
        return "" if self.newest is None else f"{self.newest} {self.steps[self.newest].tag}"


def published(store: ObjectStore, checkpoints: str) -> Published:
    """Return the checkpoints below a URL. Asks once, and raises what the store raises."""
    objects = store.find(checkpoints)
    steps = {
        number: listing
        for name, listing in objects.items()
        if name.endswith(f"/{run_files.MANIFEST}")
        and (number := step_number(name.removesuffix(f"/{run_files.MANIFEST}"))) is not None
    }

    def named(file: str) -> int | None:
        if file not in objects:
            return None
        number = step_number(store.read(f"{checkpoints}/{file}").decode(errors="replace").strip())
        return number if number in steps else None

    newest = named(run_files.LATEST)
    if newest is None:
        newest = max(steps, key=lambda number: (steps[number].modified, number), default=None)
    return Published(checkpoints, objects, steps, newest, named(run_files.BEST))


def origin_of(directory: Path) -> tuple[str, str] | None:
    """Return the URL of a checkpoint and the tag of its manifest; None if the directory is no stub."""
    with suppress(OSError, ValueError):
        url, tag = (directory / run_files.ORIGIN).read_text(encoding="utf-8").splitlines()
        return url, tag
    return None


def write_origin(directory: Path, url: str, tag: str) -> None:
    """Record that a local checkpoint is in a store."""
    replace_file(directory / run_files.ORIGIN, f"{url}\n{tag}\n".encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is visible when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{os.urandom(8).hex()}.{path.name}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Let one process of the node at a time enter the block, for a directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(f".{directory.name}.alone"), "w", encoding="utf-8") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def update_stub(store: ObjectStore, directory: Path, url: str, manifest: StoredObject) -> None:
    """Make a local directory stand for a checkpoint in a store, unless it does so already.

    A stub of an earlier save of the same step becomes one of this save. A directory that is no stub is not
    changed, except that it becomes one if it has the same manifest.
    """
    known, file = origin_of(directory), directory / run_files.MANIFEST
    if known == (url, manifest.tag) and file.exists():
        return
    content = patiently(lambda: store.read(f"{url}/{run_files.MANIFEST}"), url)
    if known is None and file.exists():
        if file.read_bytes() == content:
            write_origin(directory, url, manifest.tag)
        return
    if known is None:
        write_origin(directory, url, manifest.tag)  # first: a manifest alone is a damaged checkpoint
    replace_file(file, content)
    write_origin(directory, url, manifest.tag)


def has_checkpoint(url: str) -> bool:
    """Return whether a URL names a published checkpoint, a run or checkpoints/ with one, or `latest` or
    `best`.

    Raises:
        StoreError: the store cannot be reached.
    """
    try:
        return _place(normal(url)) is not None
    except FileNotFoundError:
        return False


def fetched(url: str) -> Path:
    """Return the stub of the checkpoint that a URL names as a path would (`checkpoint.find`).

    Files of its run that are read with it, such as the tokenizer, are copied.

    Raises:
        StoreError: there is none, or the store cannot be reached.
    """
    place = _place(normal(url))
    if place is None:
        raise StoreError(
            f"{normal(url)} is not a checkpoint: {run_files.MANIFEST} is missing, and it is not a run that "
            "has published one."
        )
    store, directory = store_of(place), _copy_of(place)
    with alone(directory):
        manifest = patiently(lambda: store.info(f"{place}/{run_files.MANIFEST}"), place)
        if manifest is None:
            raise StoreError(f"{place} has just been removed.")
        update_stub(store, directory, place, manifest)
        _copy_others(store, place, directory)
        checkpoints, _, _ = place.rpartition("/")
        if checkpoints.endswith(f"/{run_files.CHECKPOINTS}"):
            _copy_others(store, checkpoints.rpartition("/")[0], directory.parent.parent)
    return directory


def fetched_run(url: str) -> Path:
    """Return a local directory with stubs of all checkpoints of a run, or of a checkpoints/, in a store.

    Raises:
        StoreError: there is none, or the store cannot be reached.
    """
    url, store = normal(url), store_of(url)
    for checkpoints in (f"{url}/{run_files.CHECKPOINTS}", url):
        listing = patiently(partial(published, store, checkpoints), url)
        if listing.steps:
            break
    else:
        raise StoreError(
            f"{url} has no published checkpoint: expected a run, or its {run_files.CHECKPOINTS}/."
        )
    directory = _copy_of(listing.url)
    with alone(directory):
        mirror(store, listing, directory)
    return directory


def fetched_files(url: str) -> Path:
    """Return a local copy of the files of a run in a store, without its checkpoints.

    Raises:
        StoreError: there are none, or the store cannot be reached.
    """
    url, store = normal(url), store_of(url)
    directory = _copy_of(url)
    objects = patiently(lambda: store.find(url), url)
    if run_files.CONFIG not in objects:
        raise StoreError(f"{url} is not a run: {run_files.CONFIG} is missing.")
    with alone(directory):
        for name, entry in objects.items():
            if not name.startswith(f"{run_files.CHECKPOINTS}/"):
                copy_object(store, f"{url}/{name}", entry, directory / name)
    return directory


def mirror(store: ObjectStore, listing: Published, directory: Path) -> None:
    """Make a directory of stubs, with `latest` and `best`, equal to what a store has."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("step_*"):
        if step_number(path.name) not in listing.steps and origin_of(path) is not None:
            remove_stub(path)
    for number, manifest in listing.steps.items():
        name = step_name(number)
        update_stub(store, directory / name, f"{listing.url}/{name}", manifest)
    name_steps(listing, directory)


def name_steps(listing: Published, directory: Path) -> None:
    """Write `latest` and `best` as a store has them."""
    for file, number in ((run_files.LATEST, listing.newest), (run_files.BEST, listing.best)):
        if number is None:
            (directory / file).unlink(missing_ok=True)
        else:
            replace_file(directory / file, f"{step_name(number)}\n".encode())


def remove_stub(directory: Path) -> None:
    """Remove a local checkpoint, its manifest first."""
    (directory / run_files.MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _copy_of(url: str) -> Path:
    return local(cache_directory() / "stores", url)


def _place(url: str) -> str | None:
    """Return the URL of the checkpoint that a URL names, or None."""
    store = store_of(url)
    parent, _, name = url.rpartition("/")
    if name in (run_files.LATEST, run_files.BEST):
        listing = patiently(lambda: published(store, parent), url)
        number = listing.newest if name == run_files.LATEST else listing.best
        return None if number is None else f"{parent}/{step_name(number)}"
    if patiently(lambda: store.info(f"{url}/{run_files.MANIFEST}"), url) is not None:
        return url
    for checkpoints in (f"{url}/{run_files.CHECKPOINTS}", url):
        listing = patiently(partial(published, store, checkpoints), url)
        if listing.newest is not None:
            return f"{checkpoints}/{step_name(listing.newest)}"
    return None


_OTHERS = (run_files.CONFIG, f"{run_files.TOKENIZER}/", f"{run_files.TOKENIZER}-2/", "huggingface/")


def _copy_others(store: ObjectStore, url: str, directory: Path) -> None:
    """Copy the files that are read with a checkpoint: configuration, tokenizer, companions."""
    for name, entry in patiently(lambda: store.find(url), url).items():
        if name.startswith(_OTHERS):
            copy_object(store, f"{url}/{name}", entry, directory / name)


def copy_object(store: ObjectStore, url: str, entry: StoredObject, path: Path) -> None:
    """Copy an object to a file, unless the file has its size and time."""
    with suppress(OSError):
        status = path.stat()
        if (status.st_size, int(status.st_mtime)) == (entry.size, int(entry.modified)):
            return
    replace_file(path, patiently(lambda: store.read(url), url))
    os.utime(path, (entry.modified, entry.modified))
