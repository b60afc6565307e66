"""The benchmark of collectives over real ranks."""

from __future__ import annotations

import pytest

from hybridpar.launch.forked import preload
from hybridpar.measure.collective_bench import OPERATIONS, bench


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    preload()


def test_every_operation_size_and_repeat_is_a_row() -> None:
    rows = bench(2, (64, 4096), OPERATIONS, repeats=2)
    assert [(row["op"], row["bytes"], row["repeat"]) for row in rows] == [
        (op, size, repeat) for op in OPERATIONS for size in (64, 4096) for repeat in (0, 1)
    ]
    for row in rows:
        assert row["tier"] == "measured"
        assert row["world"] == 2
        assert row["seconds"] > 0
        assert row["bus_bandwidth"] == row["wire_bytes"] / row["seconds"]
        factor = 1 if row["op"] in ("all_reduce", "p2p") else 0.5
        assert row["wire_bytes"] == factor * row["bytes"]
    assert {row["op"] for row in rows} == set(OPERATIONS)


def test_more_bytes_take_longer() -> None:
    rows = bench(2, (64, 16 << 20), ("all_reduce",), repeats=3)
    small, large = (min(row["seconds"] for row in rows if row["bytes"] == size) for size in (64, 16 << 20))
    assert large > 2 * small


def test_sizes_are_rounded_up_to_whole_elements_on_every_rank() -> None:
    (row,) = bench(3, (1,), ("all_gather",), repeats=1)
    assert (row["bytes"], row["wire_bytes"]) == (12, 8)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((2, (64,), ("all_sum",), 1), "op='all_sum' is unknown; legal: p2p, all_reduce"),
        ((1, (64,), ("p2p",), 1), "world=1 is not legal; it must be at least 2"),
        ((2, (0,), ("p2p",), 1), "size=0 is not legal; it must be at least 1"),
        ((2, (64,), ("p2p",), 0), "repeats=0 is not legal; it must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        bench(*arguments)
