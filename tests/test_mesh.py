"""The rank grid: every group is a slice, the groups of an axis partition the ranks, tp ranks are neighbours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.mesh import AXES, RankGrid

_DEGREES = st.integers(1, 4)
_GRIDS = st.builds(RankGrid, pp=_DEGREES, dp=_DEGREES, cp=_DEGREES, tp=_DEGREES)


def test_tp_is_innermost_and_pp_outermost() -> None:
    grid = RankGrid(pp=2, dp=2, cp=1, tp=2)
    assert grid.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


@given(_GRIDS, st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition_the_ranks(grid: RankGrid, axes: set) -> None:
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size))


@given(_GRIDS, st.sampled_from(AXES))
def test_ranks_of_a_group_differ_along_its_axis_alone(grid: RankGrid, axis: str) -> None:
    for group in grid.groups(axis):
        coordinates = [grid.coordinate(rank) for rank in group]
        assert [getattr(c, axis) for c in coordinates] == list(range(getattr(grid, axis)))
        others = [tuple(getattr(c, a) for a in AXES if a != axis) for c in coordinates]
        assert len(set(others)) == 1


def test_the_order_in_which_axes_are_named_does_not_matter() -> None:
    grid = RankGrid(pp=2, dp=2, cp=2, tp=2)
    assert grid.groups("tp", "dp") == grid.groups("dp", "tp")


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_grid_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="legal: 0 to 7"):
        RankGrid(pp=2, dp=2, cp=1, tp=2).coordinate(rank)
