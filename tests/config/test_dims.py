"""Every derived size of a run's mesh, over a table of configurations."""

import re
from pathlib import Path
from typing import Any

import pytest

import megalite
from megalite.config.dims import ParallelDims, filling_dp
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.config.sections.parallel import ParallelConfig
from megalite.parallel.pipeline.generator import chunks_of
from megalite.parallel.pipeline.orders import RECIPES

DERIVED = ("world", "replica", "data", "shard", "replicate", "expert_data", "stage_ranks", "stages", "microbatches")
# Options of parallel, the world (None: not known) → the sizes in this order. The global batch is 48 rows, a microbatch
# 2.
TABLE: dict[str, tuple[dict[str, Any], int | None, tuple[int, ...]]] = {
    "one process": ({}, None, (1, 1, 1, 1, 1, 1, 1, 1, 24)),
    "dp fills the world": ({"tp": 2}, 8, (8, 2, 4, 4, 1, 8, 8, 1, 6)),
    "dp is 1 where the world is not known": ({"tp": 2, "pp": 2}, None, (4, 4, 1, 1, 1, 2, 2, 2, 24)),
    "dp is 1 where none fills the world": ({"tp": 3}, 8, (3, 3, 1, 1, 1, 3, 3, 1, 24)),
    "a given dp stays": ({"dp": 2}, 8, (2, 1, 2, 2, 1, 2, 2, 1, 12)),
    "2 x 2 x 2": ({"pp": 2, "dp": 2, "tp": 2}, 8, (8, 4, 2, 2, 1, 4, 4, 2, 12)),
    "ZeRO-0 shares nothing": ({"dp": 4, "zero": 0}, 4, (4, 1, 4, 1, 4, 4, 4, 1, 6)),
    "ZeRO-3 in groups": ({"dp": 4, "zero": 3, "dp_shard": 2}, 4, (4, 1, 4, 2, 2, 4, 4, 1, 6)),
    "groups of one": ({"dp": 4, "zero": 1, "dp_shard": 1}, 4, (4, 1, 4, 1, 4, 4, 4, 1, 6)),
    "cp shares rows and states": ({"dp": 3, "cp": 2, "zero": 3}, 6, (6, 2, 6, 6, 1, 6, 6, 1, 8)),
    "cp alone": ({"cp": 4, "zero": 3}, 4, (4, 4, 4, 4, 1, 4, 4, 1, 24)),
    "cp without ZeRO": ({"cp": 2, "zero": 0}, 4, (4, 2, 4, 1, 4, 4, 4, 1, 12)),
    "all axes, in groups": (
        {"pp": 2, "dp": 4, "cp": 2, "tp": 2, "dp_shard": 4, "schedule": "zb-v"},
        32,
        (32, 8, 8, 4, 2, 16, 16, 4, 6),
    ),
    "interleaved, two stages by default": ({"pp": 4, "schedule": "interleaved"}, 4, (4, 4, 1, 1, 1, 1, 1, 8, 24)),
    "interleaved, three": ({"pp": 4, "schedule": "interleaved", "virtual_stages": 3}, 4, (4, 4, 1, 1, 1, 1, 1, 12, 24)),
}


def config_of(options: dict[str, Any]) -> Config:
    return from_dict({"parallel": options, "train": {"global_batch_size": 48, "micro_batch_size": 2}})


@pytest.mark.parametrize("row", TABLE)
def test_derived_sizes(row):
    options, world, expected = TABLE[row]
    dims = ParallelDims.of(config_of(options), world)
    assert {name: getattr(dims, name) for name in DERIVED} == dict(zip(DERIVED, expected, strict=True))
    assert dims.ep == 1
    assert dims.shard * dims.replicate == dims.data
    assert dims.ep * dims.expert_data == dims.stage_ranks
    assert dims.pp * dims.stage_ranks == dims.dp * dims.replica == dims.world


def test_dims_without_a_configuration_share_states_over_all_data_ranks():
    assert (ParallelDims(dp=2, cp=3).shard, ParallelDims(dp=2, cp=3, dp_shard=1).shard) == (6, 1)


@pytest.mark.parametrize(
    ("options", "world", "dp"), [({"tp": 2, "cp": 2}, 8, 2), ({"tp": 3}, 8, None), ({"tp": 0}, 8, None)]
)
def test_dp_fills_the_world(options, world, dp):
    assert filling_dp(ParallelConfig(**options), world) == dp


@pytest.mark.parametrize("schedule", RECIPES)
def test_stages_are_those_that_the_schedule_is_built_with(schedule):
    for virtual_stages in (None, 3) if RECIPES[schedule].chunks is None else (None,):
        dims = ParallelDims.of(config_of({"pp": 4, "schedule": schedule, "virtual_stages": virtual_stages}))
        assert dims.stages == 4 * chunks_of(schedule, virtual_stages)


def test_wrong_sizes_have_dims_for_the_rules_to_read():
    config = config_of({"dp": 0, "tp": 0})
    config.train.micro_batch_size = 0
    assert ParallelDims.of(config, 4).world == 0


def test_no_other_file_derives_a_size_of_the_mesh():
    root = Path(megalite.__file__).parent
    derives = re.compile(r"parallel\.(dp|cp|dp_shard) (or|\*)|\* \w*\.?parallel\.cp|world_size //")
    files = {str(path.relative_to(root)) for path in root.rglob("*.py") if derives.search(path.read_text())}
    assert files == {"config/dims.py"}
