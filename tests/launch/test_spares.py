"""Processes beyond the layout of an elastic run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from torch.distributed import TCPStore

from megalite.launch import spares
from megalite.launch.exit_status import END_FILE, ExitStatus
from megalite.launch.signals import RESIZE_SIGNAL

SPARE = """
from megalite.launch import signals, spares
signals.end_training_on_signal(" before the first step")  # as `prepare_process`
connect = spares._store
class Said:
    def __init__(self):
        self.store = connect()
        self.get = self.store.get
    def check(self, keys):
        print("waiting", flush=True)
        return self.store.check(keys)
spares._store = Said
spares.leave_out(2)
print("a rank")
"""


def spare(port: int, **others: str) -> subprocess.Popen[str]:
    environment = {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "a",
    }
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **others}
    return subprocess.Popen([sys.executable, "-c", SPARE], env={**os.environ, **environment}, stdout=-1, text=True)


def test_a_spare_waits_until_the_run_has_ended_and_passes_on_how(tmp_path, monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting = spare(store.port, **{END_FILE: str(tmp_path / "end")})
    sizes = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(spares.SPARES, "")  # so that it is restored
    spares.leave_out(2)
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("2", "2")
    assert waiting.stdout is not None and waiting.stdout.readline() == "waiting\n"
    for number in (signal.SIGTERM, signal.SIGUSR1, RESIZE_SIGNAL, signal.SIGINT):  # the ranks save meanwhile
        waiting.send_signal(number)
        assert waiting.stdout.readline() == "waiting\n" and waiting.poll() is None
    spares.dismiss(ExitStatus.STOPPED)
    assert "a rank" not in waiting.communicate(timeout=120)[0] and waiting.returncode == 0
    assert (tmp_path / "end").read_text() == "75", "the launcher of its node learns it"


def test_a_spare_ends_with_the_store():
    """As if the ranks had failed, where rank 0 has the store."""
    serve = "from torch.distributed import TCPStore; import time\n"
    serve += "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); print(store.port, flush=True); time.sleep(600)"
    server = subprocess.Popen([sys.executable, "-c", serve], stdout=-1, text=True)
    assert server.stdout is not None
    waiting = spare(int(server.stdout.readline()))
    assert waiting.stdout is not None and waiting.stdout.readline() == "waiting\n"
    server.kill()
    server.wait()
    assert "a rank" not in waiting.communicate(timeout=120)[0] and waiting.returncode == 0


def test_without_spares_nothing_changes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    spares.leave_out(2)
    spares.dismiss(ExitStatus.DONE)
    assert os.environ["WORLD_SIZE"] == "2"
