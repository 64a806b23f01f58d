"""Mesh arithmetic: who sits where, for any world, without a process group."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from megalite.mesh import AXES, Layout
from megalite.mesh_map import main

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
