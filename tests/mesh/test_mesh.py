"""Mesh arithmetic: who sits where, for any world, and the order in which groups are made, without a process group."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.mesh.groups import ProcessGroups
from megalite.mesh.map import main
from megalite.mesh.mesh import AXES, Layout, Mesh

layouts = st.builds(Layout, **{axis: st.integers(1, 3) for axis in AXES})


@given(layouts)
def test_rank_and_coordinates_are_inverse(layout):
    assert [layout.rank(layout.position(rank)) for rank in range(layout.world)] == list(range(layout.world))


@given(layouts, st.sets(st.sampled_from(AXES)))
def test_peers_partition_the_world(layout, axes):
    groups = {layout.peers(rank, tuple(axes)) for rank in range(layout.world)}
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert all(len(group) == prod(getattr(layout, axis) for axis in axes) for group in groups)


def test_tp_ranks_are_neighbours_and_pp_ranks_far_apart():
    layout = Layout(pp=2, dp=2, tp=2)
    assert layout.peers(5, ("tp",)) == (4, 5)
    assert layout.peers(5, ("dp",)) == (5, 7)
    assert layout.peers(5, ("pp",)) == (1, 5)
    assert layout.peers(0, ("dp", "tp")) == (0, 1, 2, 3)


def test_command_prints_every_rank(capsys):
    main(["--tp", "2", "--pp", "2", "--dp", "2"])
    out = capsys.readouterr().out
    assert "8 ranks" in out and "stage 1  replica 1  tp ranks [6, 7]" in out


def test_command_prints_the_groups_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that docs/experts.md draws."""
    main(["--tp", "2", "--dp", "4", "--ep", "4"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "8 ranks: pp 1 × dp 4 × cp 1 × tp 2, ep 4"
    groups = dict(line.strip().split(": ") for line in lines[4:])
    assert groups["ep"] == "[0, 1, 2, 3] [4, 5, 6, 7]" and groups["expert_data"] == "[0, 4] [1, 5] [2, 6] [3, 7]"
    with pytest.raises(SystemExit):
        main(["--dp", "4", "--ep", "3"])
    assert "--ep must divide dp * cp * tp (4)" in capsys.readouterr().err


# ---- the order of groups: on NCCL each is split off the world's communicator, in which every rank takes part

GROUPS: dict[str, dict[str, Any]] = {
    "one axis": {"tp": 4},
    "pipeline of two, tied": {"pp": 2, "dp": 2},
    "pipeline of three, tied": {"pp": 3, "dp": 2, "layers": 6},
    "pipeline of four, tied, staggered end": {"pp": 4, "tp": 2, "schedule": "zb-h2", "microbatches": 8},
    "both ends on one rank": {"pp": 2, "schedule": "zb-v", "microbatches": 4, "tp": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "dp": 3, "microbatches": 4},
    "replicas of shards": {"dp": 8, "dp_shard": 2, "zero": 2},
    "shards over cp": {"dp": 2, "cp": 2, "tp": 2, "zero": 3},
    "replicated key-value heads": {"tp": 4, "pp": 3, "dp": 2, "layers": 6, "zero": 1, "dp_shard": 1},
    "untied, everything": {"tp": 2, "pp": 3, "dp": 4, "dp_shard": 2, "zero": 2, "layers": 6, "tied": False},
}


def made_by(rank: int, dims: Layout, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The groups that a rank makes, in order: ranks, backend, kind."""
    groups: list[tuple[Any, ...]] = []

    def new(self: ProcessGroups, ranks: tuple[int, ...], backend: str | None = None, kind: str | None = None) -> Any:
        groups.append((ranks, backend, kind))
        return object()

    for name, value in {
        "is_initialized": True,
        "get_rank": rank,
        "get_world_size": dims.world,
        "get_backend": "nccl",
    }.items():
        monkeypatch.setattr(dist, name, lambda *args, value=value: value)
    monkeypatch.setattr(ProcessGroups, "new", new)
    monkeypatch.setattr(ProcessGroups, "connect", lambda *args: None)
    Mesh(dims, **options)
    return groups


@pytest.mark.parametrize("together", [False, True], ids=["", "counting and saving groups"])
@pytest.mark.parametrize("case", GROUPS)
def test_all_ranks_make_equally_many_groups_in_one_order(
    case: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The i-th group of every rank is over ranks whose i-th group is the same one. Those without a part in it make
    another one then."""
    given = {"layers": 4, "microbatches": 2, "tied": True, "schedule": "1f1b"} | GROUPS[case]
    microbatches, layers, tied = (given.pop(name) for name in ("microbatches", "layers", "tied"))
    model = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    config = from_dict(
        {
            "model": {**model, "num_key_value_heads": 2, "tie_word_embeddings": tied},
            "data": {"sequence_length": 16, "eod_mask_loss": together},
            "train": {"global_batch_size": microbatches * given.get("dp", 1), "micro_batch_size": 1},
            "parallel": given,
            "checkpoint": {"async_save": together},
        }
    )
    dims, options = build.layout(config), build.mesh_options(config)
    two_copies = tied and given.get("pp", 1) > 1 and given["schedule"] != "zb-v"
    assert (options["tied"] is not None) == two_copies and options["counts_tokens"] == together
    ranks = [made_by(rank, replace(dims), options, monkeypatch) for rank in range(dims.world)]
    assert len({len(groups) for groups in ranks}) == 1, {rank: len(groups) for rank, groups in enumerate(ranks)}
    for number in range(len(ranks[0])):
        for rank, groups in enumerate(ranks):
            members, backend, kind = groups[number]
            assert rank in members
            assert all(ranks[other][number] == groups[number] for other in members), (number, rank)
            assert backend == ranks[0][number][1], "a group of another backend is no split of the world's communicator"
    assert sum(backend == "gloo" for _, backend, _ in ranks[0]) == together * (1 + (dims.data > 1))
