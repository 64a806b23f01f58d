"""What follows from a configuration alone, before there are ranks."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.assembly import parts as build
from megalite.assembly.plan import activation_shape
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.mesh.mesh import Mesh
from megalite.parallel.pipeline.schedule import ActionKind
from megalite.planner.memory.activations import Activations
from megalite.training.meta_device import fake_process


def config_of(**parallel: Any) -> Config:
    model = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return from_dict(
        {"model": model, "parallel": parallel, "data": {"sequence_length": 16}, "train": {"micro_batch_size": 2}}
    )


SHARING: dict[str, dict[str, Any]] = {
    "one rank": {"zero": 3},
    "dp": {"zero": 3, "dp": 2},
    "cp": {"zero": 3, "cp": 2},
    "dp, cp": {"zero": 3, "dp": 2, "cp": 2},
    "groups of one": {"zero": 3, "dp": 2, "dp_shard": 1},
    "ZeRO-2": {"zero": 2, "cp": 2},
}


@pytest.mark.parametrize("case", SHARING)
def test_weights_are_gathered_where_the_mesh_shares_them(case):
    config = config_of(**SHARING[case])
    layout = build.layout(config)
    with fake_process(0, layout.world):
        mesh = Mesh(layout, **build.mesh_options(config))
    gathers = [action for action in build.schedule(config, 2).actions[0] if action.kind is ActionKind.GATHER]
    assert bool(gathers) == (config.parallel.zero == 3 and mesh.shard.size > 1)


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_the_planner_counts_the_activation_that_the_runtime_sends(options):
    config = config_of(**options)
    length, batch, hidden = shape = activation_shape(config)
    assert shape == (16 // (2 if "sequence_parallel" in options else 1), 2, 32)
    assert Activations(config).message == length * batch * hidden * 4
