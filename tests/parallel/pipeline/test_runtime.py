"""What the runtime does with messages that are complete before anything waits for them, as NCCL's are and gloo's
never."""

from __future__ import annotations

from typing import Any

import torch

from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.microbatch import Microbatch, StageOutput
from megalite.parallel.pipeline import runtime
from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.schedule import ActionKind
from megalite.parallel.pipeline.send_recv_actions import with_communication


class Sent:
    """A send that is complete at once."""

    def __init__(self) -> None:
        self.waited = 0

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self.waited += 1


class FirstStage:
    """Passes its tokens on."""

    def forward_state(self, microbatch: Microbatch, step: int, training: bool) -> None:
        return None

    def __call__(self, x: torch.Tensor, *rest: Any) -> StageOutput:
        return StageOutput(x.float())


def test_every_dropped_send_was_waited_for(monkeypatch) -> None:
    """Else torch holds its tensor until the watchdog looks at it."""
    sends: list[Sent] = []

    def message(*args: Any) -> Sent:
        sends.append(Sent())
        return sends[-1]

    monkeypatch.setattr(runtime, "message", message)
    mesh = Mesh(Layout())
    mesh.pp = type(mesh.pp)("pp", 0, 2, (0, 1))
    mesh.channels = {"forward_up": None}  # type: ignore[dict-item]
    plan = with_communication(build("gpipe", 2, 8, forward_only=True))
    rows = [Microbatch.of(torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(1)) for _ in range(8)]
    runner = runtime.Runtime({0: FirstStage()}, mesh, (4, 1), torch.float32, "cpu")
    runner.run(plan, rows, step=1, loss_scale=1.0, training=False)
    assert len(sends) == sum(action.kind is ActionKind.SEND_FORWARD for action in plan.actions[0]) == 8
    assert [each.waited for each in sends] == [1] * 8
