"""Bytes that one rank puts on the wire for a collective, under the bandwidth-optimal ring algorithms. No torch here.

Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; Thakur et al.
2005, "Optimization of collective communication operations in MPICH". Symbols: n ranks of the group, M bytes of the
whole tensor (the input of a reduction, the output of a gather).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


def _share(n: int, m: int) -> int:
    return m * (n - 1) // n


_WIRE: Mapping[str, Callable[[int, int], int]] = {
    "all_reduce": lambda n, m: 2 * m * (n - 1) // n,  # reduce-scatter, then all-gather
    "all_gather": _share,
    "reduce_scatter": _share,
    "all_to_all": _share,
    "broadcast": _share,  # the mean over ranks: n - 1 of them receive M
    "reduce": _share,
    "gather": _share,
    "scatter": _share,
    "send": lambda n, m: m,
    "recv": lambda n, m: 0,  # counted where it is sent
    "barrier": lambda n, m: 0,
}
OPERATIONS = tuple(_WIRE)


def wire_bytes(operation: str, ranks: int, size: int) -> int:
    """Bytes one rank sends (the mean over the group), for a tensor of `size` bytes in all."""
    return _WIRE[operation](ranks, size)
