"""Closed forms of collectives against the algorithms themselves, run step by step on parts that know their bytes."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hybridpar.comm.wire import wire_bytes
from hybridpar.parallel.sharding import part
from hybridpar.theory.collectives import (
    ALGORITHMS,
    OPERATIONS,
    Algorithm,
    Link,
    Operation,
    best_segments,
    cost,
    lower_bound,
    two_level,
)

# A rank holds contributions: (part of the tensor, rank it comes from). One message carries some of them; contributions
# to one part are combined where they meet, so that a part costs its bytes once, however many it sums.
Held = dict[int, frozenset[int]]


@dataclass
class World:
    """Ranks that send parts to each other in rounds; counts what each sends and combines."""

    ranks: int
    sizes: list[int]
    held: list[Held]
    sent: list[int] = field(default_factory=list)
    rounds: int = 0
    path: int = 0
    reduced: int = 0

    @classmethod
    def of(cls, ranks: int, size: int, start: Callable[[int], Held], parts: int | None = None) -> World:
        parts = parts or ranks
        spans = [part(size, parts, index) for index in range(parts)]
        sizes = [span.stop - span.start for span in spans]
        return cls(ranks, sizes, [start(rank) for rank in range(ranks)], [0] * ranks)

    def round(self, messages: Iterable[tuple[int, int, list[int]]], *, combine: bool = False) -> None:
        """Messages (from, to, parts), all at once, at most one out of and one into a rank."""
        listed = list(messages)
        assert max(Counter(source for source, _, _ in listed).values()) == 1
        assert max(Counter(target for _, target, _ in listed).values()) == 1
        carried = [(target, {p: self.held[source][p] for p in parts}) for source, target, parts in listed]
        longest = combined = 0
        for source, _, parts in listed:
            size = sum(self.sizes[p] for p in parts)
            self.sent[source] += size
            longest = max(longest, size)
        for target, content in carried:
            for p, ranks in content.items():
                mine = self.held[target].get(p, frozenset())
                if combine:
                    assert not mine & ranks, "a contribution would be counted twice"
                self.held[target][p] = mine | ranks
            combined = max(combined, sum(self.sizes[p] for p in content))
        self.rounds, self.path = self.rounds + 1, self.path + longest
        self.reduced += combined if combine else 0


def _own(n: int) -> Callable[[int], Held]:
    return lambda rank: {p: frozenset({rank}) for p in range(n)}


def _depth(n: int) -> int:
    return math.ceil(math.log2(n))


# Algorithms on a world. Each leaves behind what the operation promises, which _promised checks.


def _ring_reduce_scatter(w: World) -> None:
    n = w.ranks
    for step in range(n - 1):
        w.round([(r, (r + 1) % n, [(r - step - 1) % n]) for r in range(n)], combine=True)


def _ring_all_gather(w: World) -> None:
    n = w.ranks
    for step in range(n - 1):
        w.round([(r, (r + 1) % n, [(r - step) % n]) for r in range(n)])


def _binomial_broadcast(w: World) -> None:
    n, everything = w.ranks, list(range(len(w.sizes)))
    for level in range(_depth(n)):
        w.round([(r, r + 2**level, everything) for r in range(2**level) if r + 2**level < n])


def _binomial_reduce(w: World) -> None:
    n, everything = w.ranks, list(range(len(w.sizes)))
    for level in reversed(range(_depth(n))):
        w.round([(r + 2**level, r, everything) for r in range(2**level) if r + 2**level < n], combine=True)


def _binomial_scatter(w: World) -> None:
    n = w.ranks
    for level in reversed(range(_depth(n))):
        reach = 2**level
        starts = [r for r in range(0, n, 2 * reach) if r + reach < n]
        w.round([(r, r + reach, list(range(r + reach, min(r + 2 * reach, n)))) for r in starts])


def _binomial_gather(w: World) -> None:
    n = w.ranks
    for level in range(_depth(n)):
        reach = 2**level
        starts = [r for r in range(0, n, 2 * reach) if r + reach < n]
        w.round([(r + reach, r, list(range(r + reach, min(r + 2 * reach, n)))) for r in starts])


def _chain_broadcast(w: World) -> None:
    n, segments = w.ranks, len(w.sizes)
    for step in range(segments + n - 2):
        w.round([(r, r + 1, [step - r]) for r in range(n - 1) if 0 <= step - r < segments])


def _chain_reduce(w: World) -> None:
    n, segments = w.ranks, len(w.sizes)
    for step in range(segments + n - 2):
        w.round([(n - 1 - r, n - 2 - r, [step - r]) for r in range(n - 1) if 0 <= step - r < segments], combine=True)


def _halving(w: World) -> None:
    n = w.ranks
    reach = n // 2
    while reach:
        first = [(r ^ reach) // reach * reach for r in range(n)]
        w.round([(r, r ^ reach, list(range(first[r], first[r] + reach))) for r in range(n)], combine=True)
        reach //= 2


def _doubling(w: World) -> None:
    n = w.ranks
    for level in range(_depth(n)):
        reach = 2**level
        w.round([(r, r ^ reach, list(range(r // reach * reach, r // reach * reach + reach))) for r in range(n)])


def _whole_doubling(w: World) -> None:
    for level in range(_depth(w.ranks)):
        w.round([(r, r ^ 2**level, list(range(len(w.sizes)))) for r in range(w.ranks)], combine=True)


_STEPS: dict[tuple[str, str], list[Callable[[World], None]]] = {
    ("all_reduce", "ring"): [_ring_reduce_scatter, _ring_all_gather],
    ("all_reduce", "tree"): [_binomial_reduce, _binomial_broadcast],
    ("all_reduce", "chain"): [_chain_reduce, _chain_broadcast],
    ("all_reduce", "recursive"): [_halving, _doubling],
    ("all_reduce", "doubling"): [_whole_doubling],
    ("reduce_scatter", "ring"): [_ring_reduce_scatter],
    ("reduce_scatter", "tree"): [_binomial_reduce, _binomial_scatter],
    ("reduce_scatter", "recursive"): [_halving],
    ("all_gather", "ring"): [_ring_all_gather],
    ("all_gather", "tree"): [_binomial_gather, _binomial_broadcast],
    ("all_gather", "recursive"): [_doubling],
    ("broadcast", "ring"): [_binomial_scatter, _ring_all_gather],
    ("broadcast", "tree"): [_binomial_broadcast],
    ("broadcast", "chain"): [_chain_broadcast],
    ("broadcast", "recursive"): [_binomial_scatter, _doubling],
}


def _start(operation: str, n: int, parts: int) -> Callable[[int], Held]:
    if operation == "all_gather":
        return lambda rank: {rank: frozenset({rank})}
    if operation == "broadcast":
        return lambda rank: {p: frozenset({0}) for p in range(parts)} if rank == 0 else {}
    return _own(parts)


def _promised(operation: str, w: World) -> bool:
    n, everyone = w.ranks, frozenset(range(w.ranks))
    match operation:
        case "all_reduce":
            return all(w.held[r][p] == everyone for r in range(n) for p in range(len(w.sizes)))
        case "reduce_scatter":
            return all(w.held[r][r] == everyone for r in range(n))
        case "all_gather":
            return all(w.held[r][p] == frozenset({p}) for r in range(n) for p in range(n))
        case _:
            return all(w.held[r].get(p) == frozenset({0}) for r in range(n) for p in range(len(w.sizes)))


def _counts(found: Any) -> tuple[int, int, int, int]:
    return (found.rounds, found.path, found.reduced, found.wire)


def _simulated(w: World) -> tuple[int, int, int, int]:
    return (w.rounds, w.path, w.reduced, sum(w.sent) // w.ranks)


SIZES = [0, 1, 5, 97, 840, 1000, 1023]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", range(2, 10))
@pytest.mark.parametrize(("operation", "algorithm"), _STEPS)
def test_the_form_counts_what_the_algorithm_does(operation: Any, algorithm: Any, n: int, size: int) -> None:
    if algorithm in ("recursive", "doubling") and n & (n - 1):
        with pytest.raises(ValueError, match=f"power of two of ranks, not {n}"):
            cost(operation, algorithm, n, size)
        return
    for segments in (1, 3, 7) if algorithm == "chain" else (1,):
        parts = segments if algorithm == "chain" else n
        world = World.of(n, size, _start(operation, n, parts), parts)
        for step in _STEPS[operation, algorithm]:
            step(world)
        assert _promised(operation, world)
        assert _counts(cost(operation, algorithm, n, size, segments)) == _simulated(world)


def _exchange(n: int, size: int) -> World:
    """Parts of an exchange: number s*n + t is what rank s has for rank t."""
    world = World.of(n, size, lambda rank: {rank * n + p: frozenset({rank}) for p in range(n)})
    world.sizes = world.sizes * n
    return world


def _exchanged(w: World) -> bool:
    return all(source * w.ranks + r in w.held[r] for r in range(w.ranks) for source in range(w.ranks))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", range(2, 10))
def test_a_pairwise_exchange(n: int, size: int) -> None:
    world = _exchange(n, size)
    for step in range(1, n):
        world.round([(r, (r + step) % n, [r * n + (r + step) % n]) for r in range(n)])
    assert _exchanged(world)
    assert _counts(cost("all_to_all", "ring", n, size)) == _simulated(world)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_bruck_passes_parts_on_by_the_bits_of_their_way(n: int, size: int) -> None:
    world = _exchange(n, size)
    at = {s * n + t: s for s in range(n) for t in range(n)}
    for level in range(_depth(n)):
        moving = {p: place for p, place in at.items() if (p % n - p // n) % n >> level & 1}
        world.round([(r, (r + 2**level) % n, [p for p, place in moving.items() if place == r]) for r in range(n)])
        at |= {p: (place + 2**level) % n for p, place in moving.items()}
    assert _exchanged(world)
    assert _counts(cost("all_to_all", "recursive", n, size)) == _simulated(world)


NODES = [(2, 2), (3, 2), (2, 4), (4, 3), (1, 4), (4, 1)]


def _ring(operation: str, n: int, size: int) -> World:
    world = World.of(n, size, _start(operation, n, n))
    for step in _STEPS[operation, "ring"] if n > 1 else []:
        step(world)
    assert _promised(operation, world)
    return world


@pytest.mark.parametrize(("nodes", "per_node"), NODES)
@pytest.mark.parametrize("size", [840, 1023])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
def test_two_levels_are_rings_within_nodes_and_on_rails(
    operation: Operation, nodes: int, per_node: int, size: int
) -> None:
    """A node cuts the tensor into one part for each rail, each rail its part into one for each node."""
    found = two_level(operation, nodes, per_node, size)
    assert _counts(found.within) == _simulated(_ring(operation, per_node, size))
    spans = [part(size, per_node, place) for place in range(per_node)]
    rails = [_ring(operation, nodes, span.stop - span.start) for span in spans]
    assert _counts(found.across) == _simulated(max(rails, key=lambda rail: rail.path))


@pytest.mark.parametrize(("nodes", "per_node"), NODES)
@pytest.mark.parametrize("size", [840, 1023])
def test_an_exchange_in_two_levels_gathers_on_the_rail_before_it_leaves_the_node(
    nodes: int, per_node: int, size: int
) -> None:
    """What a rank has for place i of any node goes to place i of its own node; what is there for a node goes there."""
    found = two_level("all_to_all", nodes, per_node, size)

    def piece(place: int, node: int) -> int:
        whole = part(size, per_node, place)
        span = part(whole.stop - whole.start, nodes, node)
        return span.stop - span.start

    places, everywhere = range(per_node), range(nodes)
    for_place = [sum(piece(place, node) for node in everywhere) for place in places]
    within = [max(for_place[(place + step) % per_node] for place in places) for step in range(1, per_node)]
    across = [
        max(per_node * piece(place, (node + step) % nodes) for node in everywhere for place in places)
        for step in range(1, nodes)
    ]
    assert (found.within.rounds, found.within.path) == (len(within), sum(within))
    assert (found.across.rounds, found.across.path) == (len(across), sum(across))
    sent = [per_node * sum(piece(place, other) for other in everywhere if other != 0) for place in places]
    if size % (nodes * per_node) == 0:
        assert found.across.wire == sum(sent) // per_node


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_one_node_or_nodes_of_one_rank_are_one_level(operation: Operation) -> None:
    one_node, apart = two_level(operation, 1, 6, 840), two_level(operation, 6, 1, 840)
    flat = cost(operation, "ring", 6, 840)
    assert _counts(one_node.within) == _counts(apart.across) == _counts(flat)
    assert _counts(one_node.across)[:3] == _counts(apart.within)[:3] == (0, 0, 0)


def test_two_levels_send_a_node_share_across() -> None:
    """Ranks of a node share the way across: 1/8 of the tensor each, instead of the whole over one link."""
    across = two_level("all_reduce", 4, 8, 3200).across
    assert across.path == 2 * 3 * 3200 // 8 // 4
    exchange = two_level("all_to_all", 4, 8, 3200)
    assert (exchange.within.path, exchange.across.path) == (7 * 400, 3 * 800)
    fast, slow = Link(1e-6, 1e-11), Link(1e-5, 1e-10)
    assert two_level("all_reduce", 4, 8, 3200).seconds(fast, slow) < cost("all_reduce", "ring", 32, 3200).seconds(slow)


def _does(operation: Operation, algorithm: Algorithm, n: int) -> bool:
    try:
        cost(operation, algorithm, n, 0)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16, 64])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_is_below_the_lower_bounds(operation: Operation, n: int) -> None:
    ranks = 2 if operation == "send" else n
    algorithms = [algorithm for algorithm in ALGORITHMS if _does(operation, algorithm, ranks)]
    assert len(algorithms) >= (1 if operation == "all_to_all" and n & (n - 1) else 2)
    for algorithm in algorithms:
        for size in (0, 1, 12345, 64 * 1024):
            found, least = cost(operation, algorithm, ranks, size), lower_bound(operation, ranks, size)
            assert found.rounds >= least.rounds
            assert found.path >= least.path
            assert found.reduced >= least.reduced
            assert found.seconds(Link(1e-6, 1e-10, 1e-11)) >= least.seconds(Link(1e-6, 1e-10, 1e-11))


@pytest.mark.parametrize("n", [2, 3, 8, 64, 1000])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_the_ring_meets_the_bound_of_bytes(operation: Operation, n: int) -> None:
    size = 4096 * n
    found, least = cost(operation, "ring", n, size), lower_bound(operation, n, size)
    assert found.path == least.path
    assert found.reduced == least.reduced


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_recursive_halving_and_doubling_meet_the_bound_of_bytes_in_the_fewest_rounds(n: int) -> None:
    """Chan et al. 2007, bidirectional exchange: all_gather and reduce_scatter meet both bounds at once."""
    for operation in ("all_gather", "reduce_scatter", "all_reduce"):
        found, least = cost(operation, "recursive", n, 840 * n), lower_bound(operation, n, 840 * n)
        assert found.path == least.path
        assert found.rounds == least.rounds * (2 if operation == "all_reduce" else 1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_ring_sends_what_the_meter_counts(operation: Operation) -> None:
    for n, size in ((2, 1000), (5, 1001), (8, 12345)):
        ranks, algorithm = (2, "ring") if operation == "send" else (n, "tree" if operation == "broadcast" else "ring")
        assert cost(operation, algorithm, ranks, size).wire == wire_bytes(operation, ranks, size)


def test_thakurs_times_on_powers_of_two() -> None:
    """Thakur et al. 2005, sections 4.1 to 4.5, as printed, with lg p rounds and n bytes."""
    p, n, link = 16, 16 * 1000, Link(alpha=3e-5, beta=1e-8, gamma=2e-9)
    a, b, g, lg, share = link.alpha, link.beta, link.gamma, 4, n * 15 / 16
    printed = {
        ("all_gather", "ring"): 15 * a + share * b,
        ("all_gather", "recursive"): lg * a + share * b,
        ("broadcast", "tree"): lg * (a + n * b),
        ("broadcast", "ring"): (lg + p - 1) * a + 2 * share * b,
        ("all_to_all", "ring"): (p - 1) * a + share * b,
        ("all_to_all", "recursive"): lg * a + n / 2 * lg * b,
        ("reduce_scatter", "recursive"): lg * a + share * b + share * g,
        ("all_reduce", "doubling"): lg * (a + n * b + n * g),
        ("all_reduce", "recursive"): 2 * lg * a + 2 * share * b + share * g,
    }
    for (operation, algorithm), seconds in printed.items():
        assert cost(operation, algorithm, p, n).seconds(link) == pytest.approx(seconds, rel=1e-12)  # type: ignore[arg-type]


def test_latency_rules_small_tensors_and_bandwidth_large_ones() -> None:
    """The ring wins where bytes count, trees where rounds do: the reason why libraries switch."""
    link = Link(alpha=1e-5, beta=1e-10)
    small, large = 1024, 2**30
    seconds = {(a, m): cost("all_reduce", a, 64, m).seconds(link) for a in ("ring", "tree") for m in (small, large)}
    assert seconds["tree", small] < seconds["ring", small]
    assert seconds["ring", large] < seconds["tree", large]


def test_the_best_number_of_segments_is_the_best() -> None:
    link = Link(alpha=1e-5, beta=1e-9)
    best = best_segments(16, 10**7, link)
    around = {q: cost("broadcast", "chain", 16, 10**7, q).seconds(link) for q in range(1, 400)}
    assert around[best] == pytest.approx(min(around.values()), rel=1e-6)
    assert 1 < best < 399
    assert best_segments(2, 10**7, link) == 1  # nobody to hand on to
    with pytest.raises(ValueError, match="above 0"):
        best_segments(4, 100, Link(0.0, 1.0))


@pytest.mark.parametrize("n", [2, 7, 8])
def test_many_sizes_at_once_cost_what_they_cost_alone(n: int) -> None:
    sizes = np.array(SIZES)
    for operation in OPERATIONS:
        for algorithm in ALGORITHMS:
            ranks = 2 if operation == "send" else n
            if not _does(operation, algorithm, ranks):
                continue
            together = cost(operation, algorithm, ranks, sizes)
            alone = [cost(operation, algorithm, ranks, size) for size in SIZES]
            for name in ("path", "reduced", "wire"):
                np.testing.assert_array_equal(getattr(together, name), [getattr(one, name) for one in alone])
            np.testing.assert_allclose(
                together.seconds(Link(1.0, 2.0, 3.0)), [o.seconds(Link(1.0, 2.0, 3.0)) for o in alone]
            )


@pytest.mark.parametrize("operation", OPERATIONS[:-1])
def test_one_rank_alone_is_free(operation: Operation) -> None:
    assert _counts(cost(operation, "ring", 1, 1000)) == (0, 0, 0, 0)
    assert lower_bound(operation, 1, 1000).seconds(Link(1.0, 1.0, 1.0)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_to_none", "ring", 4, 8), "operation='all_to_none' is unknown; legal: all_reduce"),
        (("all_reduce", "star", 4, 8), "algorithm='star' is unknown; legal: ring"),
        (("all_to_all", "tree", 4, 8), "algorithm=tree does not do all_to_all; it does all_reduce"),
        (("all_reduce", "ring", 0, 8), "ranks=0"),
        (("all_reduce", "ring", 4, -1), "size=-1"),
        (("send", "ring", 3, 8), "ranks=3 is not legal for send"),
        (("all_reduce", "ring", 4, 8, 2), "segments=2 is not legal for algorithm=ring"),
    ],
)
def test_what_has_no_form_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost(*arguments)


def test_a_message_has_no_two_levels() -> None:
    with pytest.raises(ValueError, match="send"):
        two_level("send", 2, 1, 8)


def test_the_forms_need_no_torch() -> None:
    code = "import sys, hybridpar.theory.collectives; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
