"""What counts as progress, on one rank: docs/faults.md."""

import json
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from megalite.config.errors import ConfigError
from megalite.config.samples import DataError
from megalite.config.schema import Config
from megalite.config.sections.train import TrainConfig
from megalite.launch import process
from megalite.launch.causes import Lost
from megalite.launch.peers import LostRank, PeerState
from megalite.mesh.mesh import Layout, Mesh
from megalite.system.activity import SAVING, Activity
from megalite.training import watchdog
from megalite.training.bad_steps import FaultLimit
from megalite.training.hang import load


class Looks:
    """What the watchdog waits for, in a time of its own: every wait ends at once, after which the rank has moved on or
    not."""

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
def test_a_long_validation_of_equal_batches_is_no_stall(
    moving: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_record_of_a_rank_that_goes_on_is_past(tmp_path: Path) -> None:
    """`megalite explain` reads it only if no rank hangs any more."""
    mesh = Mesh(Layout())
    mesh.activity.action = "F0.0"
    dog = watchdog.Watchdog(Config(), mesh, tmp_path)
    dog.patience = 0.04
    path, moved = tmp_path / "stalls" / "rank_00000.json", Event()
    with dog:
        while not path.exists():
            moved.wait(0.01)
        assert not json.loads(path.read_text()).get("past")
        mesh.activity.runs += 1
        while not json.loads(path.read_text()).get("past"):
            moved.wait(0.01)
            mesh.activity.runs += 1
    assert load(tmp_path)[0].place["action"] == "F0.0", "all ranks went on"
    other = json.loads(path.read_text()) | {"rank": 1, "past": False}
    path.with_name("rank_00001.json").write_text(json.dumps(other))
    assert list(load(tmp_path)) == [1]


class Moving(Activity):
    """A rank that leaves its plan while another thread looks."""

    __slots__ = ("reads",)

    @property
    def action(self) -> str:
        self.reads = getattr(self, "reads", 0) + 1
        return "F0.0" if self.reads == 1 else "reduction"

    @action.setter
    def action(self, value: str) -> None:
        pass


def test_a_place_is_read_at_once(tmp_path: Path) -> None:
    mesh = Mesh(Layout())
    mesh.activity = Moving()
    mesh.activity.plan = ["F0.0", "B0.0"]
    place = watchdog.Watchdog(Config(), mesh, tmp_path)._place()
    assert (place["action"], place["number"]) == ("F0.0", 0)


def test_a_report_that_fails_does_not_keep_a_rank_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(watchdog, "_write_flight_record", lambda path: 1 / 0)
    monkeypatch.setattr(process, "exit_after_failure", lambda message, lost: ended.append((message, lost)))
    dog = watchdog.Watchdog(Config(), Mesh(Layout()), tmp_path, on_loss=lambda message, lost: 1 / 0)
    dog._end(None, "ends")
    assert ended == [("rank 0: ends", Lost())], "it awaits another rank, although it does not know which"


ERRORS = (DataError("a sample"), ConfigError("other data"), FaultLimit("20 bad steps"), ValueError("ours"), None)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_others_learn_of_an_error_of_one_rank(
    error: Exception | None, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    class Others:
        def fail(self, reason: str) -> None:
            said.append(reason)

        def close(self, left: bool) -> None:
            said.append("left")

    mesh = Mesh(Layout())
    mesh.activity.step = step
    monkeypatch.setattr(mesh.meet, "end", lambda: said.append("comes to no meeting"))
    watchdog.Watchdog(Config(), mesh, tmp_path)._leave(Others(), error)  # type: ignore[arg-type]
    own = isinstance(error, ValueError) or (isinstance(error, DataError) and step > 0)  # before, all check the data
    assert said == [*(["comes to no meeting"] if error else []), f"{type(error).__name__}: {error}" if own else "left"]


@pytest.mark.parametrize("waiting", [True, False])
def test_on_a_gpu_the_rank_of_a_past_communication_is_not_blamed(
    waiting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the host waits for the device in any place, and its last message may have arrived long ago."""

    class Alive:
        """All other ranks answer."""

        def look(self) -> None:
            pass

        def origin(self, peer: int | None) -> None:
            peers_asked.append(peer)

    peers_asked: list[int | None] = []
    monkeypatch.setattr(watchdog.torch.cuda, "is_initialized", lambda: True)
    mesh = Mesh(Layout())
    mesh.activity.enter("F0.0")
    mesh.activity.wait_for("pipeline message RF0.0<3", 3)
    if not waiting:
        mesh.activity.arrived()
    dog = watchdog.Watchdog(Config(), mesh, tmp_path)
    monkeypatch.setattr(dog, "_end", lambda verdict, what: None)
    dog._look(Alive(), stood=1e9)  # type: ignore[arg-type]
    assert peers_asked == [3 if waiting else None]


LOST = LostRank(3, PeerState.ENDED, "node1", {})
STOPPED = LostRank(3, PeerState.STOPPED, "node1", {})


@pytest.mark.parametrize(("verdict", "after"), [(LOST, watchdog.END_S), (STOPPED, 480.0)], ids=["lost", "stopped"])
@pytest.mark.parametrize("place", ["saving", "awaiting a save of others", "F0.0"])
def test_a_rank_ends_when_another_is_lost_whatever_it_does(
    place: str, verdict: LostRank, after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no time limits its work, or its wait for that of others."""
    now, ended = [0.0], list[tuple[float, LostRank | None]]()
    peers = SimpleNamespace(
        look=lambda: verdict, verdict=verdict if verdict.final else None, agree=lambda lost_rank: lost_rank
    )
    monkeypatch.setattr(watchdog, "monotonic", lambda: now[0])
    mesh = Mesh(Layout())
    mesh.activity.enter("F0.0" if place == "F0.0" else SAVING)
    if "awaiting" in place:
        mesh.activity.wait_for("the exchange of what to save over world", None, limited=False)
    dog = watchdog.Watchdog(Config(), mesh, tmp_path)
    dog._limits = watchdog.limits(600.0, nccl=True)
    monkeypatch.setattr(dog, "_end", lambda lost_rank, what: ended.append((now[0], lost_rank)))
    while not ended:
        dog._look(peers, stood=now[0])  # type: ignore[arg-type]
        now[0] += 1.0
    assert ended == [(after, verdict)]
