"""What a store has of a run is brought to the run's spool, before the run starts.

The spool is the run's directory on this machine, from which everything is uploaded. At a start it may be
empty (a new machine), as the last job left it, or older than the store (the run went on elsewhere).
`store.json` in the spool records which newest checkpoint of the store this machine has seen, and so tells
the last two apart.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from megalite.config import run_files
from megalite.config.run_files import step_name
from megalite.stores.object_store import patiently, store_of
from megalite.stores.stubs import (
    Published,
    alone,
    copy_object,
    name_steps,
    origin_of,
    published,
    remove_stub,
    replace_file,
    update_stub,
)

IN_USE_S = 60.0
"""A lock that was renewed within this time may be that of a job which uses the spool."""
LEFT_OUT = (run_files.TRACES, run_files.STALLS, run_files.CHECKPOINTS, run_files.CRASH)


def fetch_run(url: str, directory: Path) -> None:
    """Make the spool of a run ready: stubs of the published checkpoints, and the files of the run.

    What the spool has and the store does not is kept, unless the run went on elsewhere and its newest
    checkpoint is a later one. What of it is uploaded is decided once the run has resumed
    (`RunUploads.start`). Nothing is changed while a job uses the spool.

    Raises:
        StoreError: the store cannot be reached.
    """
    store, checkpoints = store_of(url), directory / run_files.CHECKPOINTS
    with alone(directory):
        if _in_use(directory):
            return
        listing = patiently(lambda: published(store, f"{url}/{run_files.CHECKPOINTS}"), url)
        leads = (read_state(directory) or "") != listing.token
        _update_stubs(listing, checkpoints, leads)
        if leads:
            checkpoints.mkdir(parents=True, exist_ok=True)
            name_steps(listing, checkpoints)
            for name, each in patiently(lambda: store.find(url), url).items():
                if not name.startswith(LEFT_OUT):
                    copy_object(store, f"{url}/{name}", each, directory / name)
            write_state(directory, listing.token)


def _update_stubs(listing: Published, checkpoints: Path, leads: bool) -> None:
    """Make stubs of published checkpoints.

    Args:
        leads: whether the store has a newer checkpoint than this machine has seen: then a checkpoint here
            that waits for its upload makes room for the published one of the same step, and is removed if it
            is older than the newest one, which was not trained from it.
    """
    for path in checkpoints.glob("step_*"):
        number = run_files.step_number(path.name)
        if number is None or origin_of(path) is None:
            if not leads or number is None:
                continue
            if number in listing.steps:
                if not _is_same(listing, number, path):
                    remove_stub(path)
            elif number < (listing.newest or 0):
                remove_stub(path)
                line = f"{path} was removed: it was not uploaded, and the run went on elsewhere without it"
                print(line, file=sys.stderr, flush=True)
        elif number not in listing.steps:
            remove_stub(path)
    for number, manifest in listing.steps.items():
        name = step_name(number)
        update_stub(store_of(listing.url), checkpoints / name, f"{listing.url}/{name}", manifest)


def _is_same(listing: Published, number: int | None, path: Path) -> bool:
    """Return whether a local checkpoint is the published one, which a killed job did not record."""
    assert number is not None
    name = f"{step_name(number)}/{run_files.MANIFEST}"
    manifest = path / run_files.MANIFEST
    if not manifest.exists() or manifest.stat().st_size != listing.objects[name].size:
        return False
    store = store_of(listing.url)
    return manifest.read_bytes() == patiently(lambda: store.read(f"{listing.url}/{name}"), listing.url)


def read_state(directory: Path) -> str | None:
    """Return the token of the newest checkpoint of the store that a spool has seen; None: it has seen
    none.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((directory / run_files.STORE_STATE).read_text(encoding="utf-8"))["newest"])
    return None


def write_state(directory: Path, token: str) -> None:
    """Record the token of the newest checkpoint of the store."""
    replace_file(directory / run_files.STORE_STATE, json.dumps({"newest": token}).encode())


def _in_use(directory: Path) -> bool:
    """Return whether a job may use the spool: the lock is fresh, and its process is not known to be gone."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        lock = directory / run_files.LOCK
        if time.time() - lock.stat().st_mtime >= IN_USE_S:
            return False
        holder = json.loads(lock.read_text(encoding="utf-8"))
        return holder["host"] != os.uname().nodename or Path(f"/proc/{holder['pid']}").exists()
    return False
