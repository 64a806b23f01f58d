"""What counts as progress, on one rank: docs/faults.md."""

from pathlib import Path
from time import sleep

import pytest

from megalite.config.schema import Config, TrainConfig
from megalite.mesh import Layout, Mesh
from megalite.training.watchdog import Watchdog

PATIENCE = 0.4


@pytest.mark.parametrize("moving", [True, False])
def test_a_long_validation_of_equal_batches_is_no_stall(moving: bool, tmp_path: Path) -> None:
    mesh = Mesh(Layout())
    watchdog = Watchdog(Config(train=TrainConfig(watchdog="1s")), mesh, tmp_path)
    watchdog.patience = PATIENCE
    with watchdog:
        for _ in range(10):
            mesh.activity.action = "F0.0"
            sleep(PATIENCE / 4)
            mesh.activity.runs += moving
    assert (tmp_path / "stalls").exists() == (not moving)
