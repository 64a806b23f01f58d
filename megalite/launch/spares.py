"""Processes beyond the layout of an elastic run.

On several nodes, and under torchrun, a process is started for every place, and the layout may use fewer.
The others are spares: they wait without a process group until the run ends, and take no part in it. Signals
do not end them: a spare that ended first would look like a failed rank, while the ranks save. Under `megalite
train --nproc` on one node none are started.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from megalite.launch.exit_status import ExitStatus, process_status
from megalite.launch.machine import local_world_size
from megalite.launch.signals import RESIZE_SIGNAL, SIGNALS, SignalListener

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

ENDED = "megalite/ended"
SPARES = "MEGALITE_SPARES"
"""Environment variable, set by `leave_out`: the number of spares."""
POLL_S = 0.5


def leave_out(used: int) -> None:
    """Make the first `used` processes the ranks of the run. In the others, wait until the run ends, and end
    the process."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if used >= started:
        return
    if int(os.environ["RANK"]) >= used:
        _wait()
    if local_world_size() == started:  # one node
        os.environ["LOCAL_WORLD_SIZE"] = str(used)
    os.environ["WORLD_SIZE"], os.environ[SPARES] = str(used), str(started - used)


def dismiss(status: ExitStatus) -> None:
    """Tell the spares how the run has ended. Called by rank 0."""
    if SPARES in os.environ and os.environ["RANK"] == "0":
        _store().set(ENDED, str(int(status)))
        time.sleep(2 * POLL_S)  # the store may end with this process


def _wait() -> None:
    status = ExitStatus.DONE
    try:
        store = _store()  # rank 0 is there: until then a signal ends this process as it ends a rank
        SignalListener(lambda number: None, (*SIGNALS, signal.SIGUSR1, RESIZE_SIGNAL))
        while not store.check([ENDED]):
            time.sleep(POLL_S)
        status = ExitStatus(int(store.get(ENDED)))
    except RuntimeError:  # the store has ended: the run has, or its ranks will be started again
        pass
    os._exit(process_status(status))


def _store() -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(minutes=10), wait_for_workers=False)
