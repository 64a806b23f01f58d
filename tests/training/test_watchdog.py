"""What counts as progress, on one rank: docs/faults.md."""

from pathlib import Path
from threading import Event

import pytest

from megalite.activity import Activity
from megalite.config.schema import Config, TrainConfig
from megalite.mesh import Layout, Mesh
from megalite.training import watchdog


class Looks:
    """What the watchdog waits for, in a time of its own: every wait ends at once, after which the rank has moved on or not."""

    def __init__(self, activity: Activity, moving: bool, looks: int):
        self.activity, self.moving, self.left, self.now, self.done = activity, moving, looks, 0.0, Event()

    def wait(self, seconds: float) -> bool:
        """As of threading.Event: True ends the watchdog."""
        if not self.left:
            self.done.set()
            return True
        self.left, self.now = self.left - 1, self.now + seconds
        self.activity.action = "F0.0"
        self.activity.runs += self.moving
        return False

    def set(self) -> None:
        pass


@pytest.mark.parametrize("moving", [True, False])
def test_a_long_validation_of_equal_batches_is_no_stall(moving: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watched for five times as long as the watchdog's patience."""
    mesh = Mesh(Layout())
    looks = Looks(mesh.activity, moving, looks=20)
    monkeypatch.setattr(watchdog, "Event", lambda: looks)
    monkeypatch.setattr(watchdog, "monotonic", lambda: looks.now)
    with watchdog.Watchdog(Config(train=TrainConfig(watchdog="8s")), mesh, tmp_path):
        assert looks.done.wait(60)
    assert (tmp_path / "stalls").exists() == (not moving)
    if not moving:
        assert (tmp_path / "stalls" / "rank_00000.txt").read_text().count("rank 0: no progress for 8 s") == 1
