"""What a collective costs, algorithm by algorithm: rounds, bytes and sums, and their time. No torch here.

Symbols (Chan et al. 2007, Thakur et al. 2005): n ranks (p there); M bytes of the whole tensor: the input of a
reduction, an exchange or a broadcast, the output of a gather (n there); alpha seconds a message, beta seconds a byte
sent, gamma seconds a byte combined (Hockney 1994). A tensor is cut into n parts as even as whole bytes allow, the first
M mod n one byte longer; c = ceil(M/n) is the longest, and P(k) are the bytes of the first k.

Time is alpha*rounds + beta*path + gamma*reduced: all ranks work in rounds, in each of which a rank sends one message
and receives one, and a round lasts as long as its longest message. `path` sums the longest messages, `reduced` the
longest combinations; `wire` is what a rank sends, mean over the ranks, rounded down (as in hybridpar.comm.wire).

    ring          all_reduce 2(n-1) rounds of c (Patarasuk & Yuan 2009); all_gather and reduce_scatter n-1
                  rounds of c (Thakur et al. 2005, section 4.1); all_to_all pairwise, n-1 rounds of c (section 4.3);
                  broadcast: a binomial scatter, then the ring's all_gather (section 4.2)
    tree          binomial trees of k = ceil(log2 n) rounds: broadcast k rounds of M, all_reduce a reduction and a
                  broadcast, all_gather a gather and a broadcast, reduce_scatter a reduction and a scatter (Chan et al.
                  2007, minimum spanning trees)
    chain         broadcast down a chain in q segments: q+n-2 rounds; all_reduce: up the chain, then down
    recursive     for powers of two: all_gather by doubling, reduce_scatter by halving, log2 n rounds of P(1), P(2),
                  P(4)... (Thakur et al. 2005, sections 4.1 and 4.4); all_reduce one after the other (section 4.5,
                  Rabenseifner); broadcast a scatter and a doubling all_gather (section 4.2); all_to_all by Bruck et al.
                  1997: log2 n rounds of M/2
    doubling      for powers of two: all_reduce of the whole tensor with a partner, log2 n rounds of M (section 4.5)

On nodes of equally many ranks (`two_level`): rings within nodes and across them, each rank across with its peers of the
same place on every node (its rail).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from hybridpar.comm.wire import wire_bytes

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Algorithm = Literal["ring", "tree", "chain", "recursive", "doubling"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

# One number of bytes, or many at once.
Bytes = int | npt.NDArray[np.int64]
Real = float | npt.NDArray[np.floating]


@dataclass(frozen=True)
class Link:
    """A network: `alpha` seconds a message, `beta` seconds a byte, `gamma` seconds to combine a byte."""

    alpha: float
    beta: float
    gamma: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Rounds, bytes on the longest path, bytes combined on it, and bytes a rank sends (mean, rounded down)."""

    rounds: int
    path: Bytes
    reduced: Bytes
    wire: Bytes

    def seconds(self, link: Link) -> Real:
        """Time of one call with nothing else on the network."""
        return link.alpha * self.rounds + link.beta * self.path + link.gamma * self.reduced


@dataclass(frozen=True)
class TwoLevelCost:
    """A collective in two levels: what runs within nodes and what runs across them, one after the other."""

    within: Cost
    across: Cost

    def seconds(self, within: Link, across: Link) -> Real:
        """Time of one call; the ranks of a node share no link across nodes (one network card each)."""
        return self.within.seconds(within) + self.across.seconds(across)


@dataclass(frozen=True)
class LowerBound:
    """What no algorithm can go below: rounds, bytes sent or received by some rank, bytes combined by some rank."""

    rounds: int
    path: Real
    reduced: Real

    def seconds(self, link: Link) -> Real:
        """No call is faster than this, whatever the algorithm."""
        return link.alpha * self.rounds + link.beta * self.path + link.gamma * self.reduced


def cost(operation: Operation, algorithm: Algorithm, ranks: int, size: Bytes, segments: int = 1) -> Cost:
    """Cost of one call over `ranks` ranks of a tensor of `size` bytes in all.

    Args:
        operation: one of OPERATIONS.
        algorithm: one of ALGORITHMS; a message (`send`) has no algorithm, any is taken.
        ranks: n, at least 1 (a call among one rank is free); 2 for `send`.
        size: M, not negative; a number or an array of numbers.
        segments: q, pieces that a chain passes on one by one; the other algorithms know none.

    Raises:
        ValueError: an unknown operation, one that the algorithm does not do, ranks that it does not do, or a size,
            ranks or segments out of range.
    """
    _check(operation, algorithm, ranks, size, segments)
    if operation == "send":
        return Cost(1, size, 0 * size, size)
    if ranks == 1:
        return Cost(0, 0 * size, 0 * size, 0 * size)
    if algorithm == "chain":
        return _chain(operation, ranks, size, segments)
    return _FORMS[algorithm][operation](ranks, size)


def two_level(operation: Operation, nodes: int, per_node: int, size: Bytes) -> TwoLevelCost:
    """Cost of one call over `nodes` nodes of `per_node` ranks, rings within and across nodes.

    all_reduce: reduce_scatter within, all_reduce of a part across, all_gather within. all_gather: across, then within;
    reduce_scatter and all_to_all: within, then across; broadcast: to one rank of each node, then within.

    Raises:
        ValueError: no such operation in two levels, or a size or number out of range.
    """
    if nodes < 1 or per_node < 1:
        raise ValueError(f"nodes={nodes}, per_node={per_node}: both must be at least 1")
    _check(operation, "ring", nodes * per_node, size, 1)
    part = _longest(size, per_node)
    match operation:
        case "all_reduce":
            # Within a node what an all_reduce does: reduce_scatter before, all_gather after.
            within = cost(operation, "ring", per_node, size)
            return TwoLevelCost(within, cost(operation, "ring", nodes, part))
        case "all_gather" | "reduce_scatter":
            return TwoLevelCost(cost(operation, "ring", per_node, size), cost(operation, "ring", nodes, part))
        case "all_to_all":
            # A part for one node is made of what each rank of this node has for it.
            longest = per_node * _longest(part, nodes)
            across = Cost(nodes - 1, (nodes - 1) * longest, 0 * size, wire_bytes_of("all_to_all", nodes, size))
            return TwoLevelCost(cost(operation, "ring", per_node, size), across)
        case "broadcast":
            across = cost(operation, "ring", nodes, size)
            # Only one rank of a node takes part across.
            return TwoLevelCost(
                cost(operation, "ring", per_node, size),
                Cost(across.rounds, across.path, across.reduced, across.wire // per_node),
            )
        case _:
            raise ValueError(f"{operation} has no form in two levels; legal: all of {', '.join(OPERATIONS[:-1])}")


def lower_bound(operation: Operation, ranks: int, size: Bytes) -> LowerBound:
    """The least rounds, bytes and combined bytes of any algorithm that sends and receives one message at a time.

    Source: Chan et al. 2007, lower bounds: ceil(log2 n) rounds, as what a rank knows at most doubles in each;
    broadcast M; gathers, scatters and reductions M(n-1)/n; all_reduce 2M(n-1)/n, which the ring meets (Patarasuk & Yuan
    2009); reductions combine M(n-1)/n.

    Raises:
        ValueError: an unknown operation, or ranks or a size out of range.
    """
    _check(operation, "ring", ranks, size, 1)
    if ranks == 1:
        return LowerBound(0, 0.0 * size, 0.0 * size)
    share = size * (ranks - 1) / ranks
    path = {"all_reduce": 2 * share, "broadcast": 1.0 * size, "send": 1.0 * size}.get(operation, share)
    combines = operation in ("all_reduce", "reduce_scatter")
    return LowerBound(_depth(ranks), path, share if combines else 0.0 * size)


def best_segments(ranks: int, size: int, link: Link) -> int:
    """The q at which a chain's broadcast takes least: (q+n-2)*alpha + (n-2)*beta*M/q + beta*M is least at
    sqrt((n-2)*M*beta/alpha), at least 1 and no more than one for each byte.

    Raises:
        ValueError: alpha that is not above 0, which would ask for ever smaller segments.
    """
    if link.alpha <= 0:
        raise ValueError(f"alpha={link.alpha} is not legal; it must be above 0")
    ideal = math.sqrt(max(0, ranks - 2) * size * link.beta / link.alpha)
    near = {min(max(1, size), max(1, whole)) for whole in (math.floor(ideal), math.ceil(ideal))}
    return min(near, key=lambda q: (q + ranks - 2) * link.alpha + (ranks - 2) * link.beta * size / q)


def wire_bytes_of(operation: str, ranks: int, size: Bytes) -> Bytes:
    """`hybridpar.comm.wire.wire_bytes`, for arrays of sizes too (its arithmetic is that of whole numbers)."""
    return cast(Bytes, wire_bytes(operation, ranks, cast(int, size)))


def _check(operation: str, algorithm: str, ranks: int, size: Bytes, segments: int) -> None:
    if operation not in OPERATIONS:
        raise ValueError(f"operation={operation!r} is unknown; legal: {', '.join(OPERATIONS)}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; legal: {', '.join(ALGORITHMS)}")
    if ranks < 1 or segments < 1:
        raise ValueError(f"ranks={ranks}, segments={segments}: both must be at least 1")
    if np.any(np.asarray(size) < 0):
        raise ValueError(f"size={size} is not legal; it must not be negative")
    if operation == "send":
        if ranks != 2:
            raise ValueError(f"ranks={ranks} is not legal for send, which has 2 ends")
        return
    does = _CHAINED if algorithm == "chain" else tuple(_FORMS[cast(Algorithm, algorithm)])
    if operation not in does:
        raise ValueError(f"algorithm={algorithm} does not do {operation}; it does {', '.join(does)}")
    if algorithm in ("recursive", "doubling") and ranks & (ranks - 1):
        raise ValueError(f"algorithm={algorithm} takes a power of two of ranks, not {ranks}")
    if segments > 1 and algorithm != "chain":
        raise ValueError(f"segments={segments} is not legal for algorithm={algorithm}; only a chain is cut")


def _depth(n: int) -> int:
    return (n - 1).bit_length()  # ceil(log2 n)


def _longest(size: Bytes, parts: int) -> Bytes:
    return -(-size // parts)


def _first(count: int, size: Bytes, parts: int) -> Bytes:
    """P(count): bytes of the first parts, which are the longest."""
    return count * (size // parts) + _at_most(size % parts, count)


def _at_most(value: Bytes, most: int) -> Bytes:
    return min(value, most) if isinstance(value, int) else np.minimum(value, most)


def _after(first: Cost, second: Cost, *, wire: Bytes) -> Cost:
    """One after the other; `wire` is told, as the sum of two numbers rounded down may lose a byte."""
    return Cost(first.rounds + second.rounds, first.path + second.path, first.reduced + second.reduced, wire)


# Ring


def _ring_share(operation: Operation, n: int, size: Bytes) -> Cost:
    path = (n - 1) * _longest(size, n)
    reduced = path if operation == "reduce_scatter" else 0 * size
    return Cost(n - 1, path, reduced, wire_bytes_of(operation, n, size))


def _ring_all_reduce(n: int, size: Bytes) -> Cost:
    whole = wire_bytes_of("all_reduce", n, size)
    return _after(_ring_share("reduce_scatter", n, size), _ring_share("all_gather", n, size), wire=whole)


# Binomial trees. In a scatter the part of rank i passes as many links as i has ones in binary.


def _scatter(n: int, size: Bytes) -> tuple[Bytes, Bytes]:
    """Path of a binomial scatter (or, the other way round, gather) and the bytes that all ranks send together."""
    path: Bytes = 0 * size
    for level in range(_depth(n)):
        reach = 2**level
        path = path + _first(min(2 * reach, n), size, n) - _first(reach, size, n)
    links = [rank.bit_count() for rank in range(n)]
    before = np.concatenate([[0], np.cumsum(links)])
    total = int(before[-1]) * (size // n) + before[size % n]
    return path, int(total) if isinstance(size, int) else total


def _tree_broadcast(n: int, size: Bytes) -> Cost:
    return Cost(_depth(n), _depth(n) * size, 0 * size, wire_bytes_of("broadcast", n, size))


def _tree_all_reduce(n: int, size: Bytes) -> Cost:
    depth = _depth(n)
    return Cost(2 * depth, 2 * depth * size, depth * size, wire_bytes_of("all_reduce", n, size))


def _tree_share(operation: Operation, n: int, size: Bytes) -> Cost:
    """all_gather: a gather, then a broadcast; reduce_scatter: a reduction, then a scatter."""
    depth = _depth(n)
    path, total = _scatter(n, size)
    reduced = depth * size if operation == "reduce_scatter" else 0 * size
    return Cost(2 * depth, path + depth * size, reduced, (total + (n - 1) * size) // n)


def _scattered_broadcast(gather: Cost, n: int, size: Bytes) -> Cost:
    path, total = _scatter(n, size)
    scatter = Cost(_depth(n), path, 0 * size, 0 * size)
    return _after(scatter, gather, wire=(total + (n - 1) * size) // n)


# Chains


_CHAINED: tuple[Operation, ...] = ("all_reduce", "broadcast")


def _chain(operation: Operation, n: int, size: Bytes, segments: int) -> Cost:
    """A round passes the segment that has come farthest last; the first, the longest, fills the chain."""
    rounds = segments + n - 2
    path = (n - 2) * _longest(size, segments) + size
    if operation == "broadcast":
        return Cost(rounds, path, 0 * size, wire_bytes_of(operation, n, size))
    return Cost(2 * rounds, 2 * path, path, wire_bytes_of(operation, n, size))


# Recursive halving and doubling


def _recursive_share(operation: Operation, n: int, size: Bytes) -> Cost:
    path: Bytes = 0 * size
    for level in range(_depth(n)):
        path = path + _first(2**level, size, n)
    reduced = path if operation == "reduce_scatter" else 0 * size
    return Cost(_depth(n), path, reduced, wire_bytes_of(operation, n, size))


def _recursive_all_reduce(n: int, size: Bytes) -> Cost:
    whole = wire_bytes_of("all_reduce", n, size)
    return _after(_recursive_share("reduce_scatter", n, size), _recursive_share("all_gather", n, size), wire=whole)


def _bruck(n: int, size: Bytes) -> Cost:
    """In round k a rank sends what has bit k of its distance left: 2^k times every 2^(k+1)-th part."""
    path: Bytes = 0 * size
    for level in range(_depth(n)):
        stride = 2 ** (level + 1)
        path = path + 2**level * (n // stride * (size // n) + _longest(size % n, stride))
    return Cost(_depth(n), path, 0 * size, size * _depth(n) // 2)


def _doubling_all_reduce(n: int, size: Bytes) -> Cost:
    whole = _depth(n) * size
    return Cost(_depth(n), whole, whole, whole)


_Form = Callable[[int, Bytes], Cost]
_FORMS: Mapping[Algorithm, Mapping[Operation, _Form]] = {
    "ring": {
        "all_reduce": _ring_all_reduce,
        "all_gather": lambda n, size: _ring_share("all_gather", n, size),
        "reduce_scatter": lambda n, size: _ring_share("reduce_scatter", n, size),
        "all_to_all": lambda n, size: _ring_share("all_to_all", n, size),
        "broadcast": lambda n, size: _scattered_broadcast(_ring_share("all_gather", n, size), n, size),
    },
    "tree": {
        "all_reduce": _tree_all_reduce,
        "all_gather": lambda n, size: _tree_share("all_gather", n, size),
        "reduce_scatter": lambda n, size: _tree_share("reduce_scatter", n, size),
        "broadcast": _tree_broadcast,
    },
    "recursive": {
        "all_reduce": _recursive_all_reduce,
        "all_gather": lambda n, size: _recursive_share("all_gather", n, size),
        "reduce_scatter": lambda n, size: _recursive_share("reduce_scatter", n, size),
        "all_to_all": _bruck,
        "broadcast": lambda n, size: _scattered_broadcast(_recursive_share("all_gather", n, size), n, size),
    },
    "doubling": {"all_reduce": _doubling_all_reduce},
}
