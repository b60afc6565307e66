"""A scale model as a value, and the exact commands that bring it up and down. Pure; no torch here.

Topology: a network namespace for each rank, one for each node (which holds a bridge) and one for the spine (another
bridge), joined by veth pairs. `tc tbf` shapes what leaves an interface, so each link has one at either end: the link
of a rank runs at the intra-node rate, the uplink of a node at the inter-node rate, in both directions. Ranks of a node
share its uplink, as they share its NICs in life. Nothing is ever made in the machine's own namespace, so deleting the
namespaces takes every interface with them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

# tbf lets this much through at once [s of the link's rate]: less costs CPU, more lets short messages run unshaped.
_BURST_S = 0.0002
_MTU = 9000
_LEAST_BURST = _MTU + 500  # one frame with its headers
# Bytes the kernel hands down in one piece; where the burst is smaller, tbf breaks it up into frames.
_SEGMENT = 16384
# Bytes a link queues [B]. It never drops: a lost packet would cost a retransmission time-out of 200 ms.
_QUEUE = 32 << 20
_LARGEST_SIDE = 250
_LARGEST_WORLD = 256
_LEAST_RATE = 1_000_000
_LARGEST_RATE = 100_000_000_000
_LEAST_SHARE = 0.01
_LARGEST_SHARE = 64.0
_ID = re.compile(r"[0-9a-f]{6}")

Command = tuple[str, ...]


class PlanError(ValueError):
    """A scale model that cannot be; one sentence a fault, naming the field, its value and what is legal."""


@dataclass(frozen=True)
class Plan:
    """A scale model of `nodes` x `devices_per_node` devices.

    Attributes:
        nodes: machines, each a bridge.
        devices_per_node: ranks on each.
        intra_bit_s: rate of each rank's link, each direction [bit/s].
        inter_bit_s: rate of each node's uplink, each direction, shared by its ranks [bit/s].
        device_share: CPU time of a rank over wall time, 1.0 being one core.
        device_memory_bytes: what a device holds [B]; 0: without limit.
        testbed_id: six hex digits that tell this testbed's names from all others'.
    """

    nodes: int
    devices_per_node: int
    intra_bit_s: int
    inter_bit_s: int
    device_share: float
    device_memory_bytes: int = 0
    testbed_id: str = ""

    def __post_init__(self) -> None:
        if not self.testbed_id:
            object.__setattr__(self, "testbed_id", secrets.token_hex(3))
        faults = _faults(self)
        if faults:
            raise PlanError("\n".join(faults))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.devices_per_node

    @property
    def prefix(self) -> str:
        """What every name of this testbed begins with."""
        return prefix_of(self.testbed_id)

    @property
    def label(self) -> str:
        """Names the testbed in tables: two runs with the same label can be compared in time."""
        rates = f"{_short(self.intra_bit_s)}-{_short(self.inter_bit_s)}"
        return f"scale-{self.nodes}x{self.devices_per_node}-{rates}-share{self.device_share:g}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Of ranks, nodes and spine."""
        ranks = tuple(self.namespace(rank) for rank in range(self.world))
        return (*ranks, *map(self.node_namespace, range(self.nodes)), self.spine_namespace)

    @property
    def spine_namespace(self) -> str:
        """Of the bridge that joins the nodes."""
        return f"{self.prefix}-spine"

    def node_namespace(self, node: int) -> str:
        """Of the bridge of a node."""
        return f"{self.prefix}-n{node}"

    def namespace(self, rank: int) -> str:
        """Of a rank."""
        return f"{self.prefix}-r{rank}"

    def interface(self, rank: int) -> str:
        """The network interface of a rank, in its namespace."""
        return f"{self.prefix}r{rank}"

    def address(self, rank: int) -> str:
        """IPv4 address of a rank."""
        return f"10.77.{self.node_of(rank)}.{rank % self.devices_per_node + 1}"

    def node_of(self, rank: int) -> int:
        """The node a rank is on: neighbouring ranks share one.

        Raises:
            PlanError: no such rank.
        """
        if not 0 <= rank < self.world:
            raise PlanError(f"rank={rank} is not on the testbed; legal: 0 to {self.world - 1}")
        return rank // self.devices_per_node

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Plan:
        """The inverse of `as_json`.

        Raises:
            PlanError: a field is missing, unknown or out of its range.
        """
        try:
            return cls(**content)
        except TypeError as error:
            raise PlanError(f"testbed: {error}") from None


def prefix_of(testbed_id: str) -> str:
    """What every name of a testbed begins with; interface names may have 15 letters in all."""
    return f"hp{testbed_id}"


def _faults(plan: Plan) -> list[str]:
    ranges: tuple[tuple[str, float, float], ...] = (
        ("nodes", 1, _LARGEST_SIDE),
        ("devices_per_node", 1, _LARGEST_SIDE),
        ("intra_bit_s", _LEAST_RATE, _LARGEST_RATE),
        ("inter_bit_s", _LEAST_RATE, _LARGEST_RATE),
        ("device_share", _LEAST_SHARE, _LARGEST_SHARE),
        ("device_memory_bytes", 0, 1 << 50),
    )
    faults = []
    for name, least, largest in ranges:
        value = getattr(plan, name)
        whole = name != "device_share"
        if not _is_number(value, whole) or not least <= value <= largest:
            kind = "a whole number from" if whole else "a number from"
            faults.append(f"testbed.{name}={value!r} is not legal; legal: {kind} {least:g} to {largest:g}")
    if not faults and plan.world > _LARGEST_WORLD:
        faults.append(
            f"testbed.nodes={plan.nodes} times testbed.devices_per_node={plan.devices_per_node} are {plan.world} "
            f"ranks; legal: at most {_LARGEST_WORLD}"
        )
    if not isinstance(plan.testbed_id, str) or not _ID.fullmatch(plan.testbed_id):
        faults.append(f"testbed.testbed_id={plan.testbed_id!r} is not legal; legal: six of the digits 0-9 and a-f")
    return faults


def _is_number(value: object, whole: bool) -> bool:
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)


def _short(bit_s: int) -> str:
    return f"{bit_s / 1e6:g}M"


def caution(plan: Plan, cores: int) -> str | None:
    """Why devices would not get their share, in one sentence; None where the cores suffice."""
    needed = plan.world * plan.device_share
    if needed <= cores:
        return None
    return (
        f"{plan.world} devices of testbed.device_share={plan.device_share:g} ask for {needed:g} cores and there are "
        f"{cores}: they will be slower than asked; a share of {cores / plan.world:g} would fit"
    )


def up_commands(plan: Plan) -> tuple[Command, ...]:
    """What brings the network up, in order."""
    commands: list[Command] = [("ip", "netns", "add", name) for name in plan.namespaces]
    commands += _bridge(plan.spine_namespace, _spine_bridge(plan))
    for node in range(plan.nodes):
        commands += _node(plan, node)
    for rank in range(plan.world):
        commands += _rank(plan, rank)
    return tuple(commands)


def down_commands(namespaces: Iterable[str]) -> tuple[Command, ...]:
    """What takes namespaces down, and with them the interfaces that they hold."""
    return tuple(("ip", "netns", "del", name) for name in namespaces)


def burst_bytes(bit_s: int) -> int:
    """What a link lets through at once [B]."""
    return max(_LEAST_BURST, round(bit_s / 8 * _BURST_S))


def _spine_bridge(plan: Plan) -> str:
    return f"{plan.prefix}s"


def _node_bridge(plan: Plan, node: int) -> str:
    return f"{plan.prefix}b{node}"


def _node(plan: Plan, node: int) -> list[Command]:
    """A bridge, and its uplink to the spine."""
    inside, uplink, port = plan.node_namespace(node), f"{plan.prefix}u{node}", f"{plan.prefix}d{node}"
    return [
        *_bridge(inside, _node_bridge(plan, node)),
        *_link(inside, uplink, plan.spine_namespace, port, plan.inter_bit_s),
        ("ip", "-n", inside, "link", "set", uplink, "master", _node_bridge(plan, node)),
        ("ip", "-n", plan.spine_namespace, "link", "set", port, "master", _spine_bridge(plan)),
    ]


def _rank(plan: Plan, rank: int) -> list[Command]:
    """A link from the rank to the bridge of its node, and its address."""
    node, inside = plan.node_of(rank), plan.namespace(rank)
    outside, port = plan.node_namespace(node), f"{plan.prefix}p{rank}"
    return [
        *_link(inside, plan.interface(rank), outside, port, plan.intra_bit_s),
        ("ip", "-n", outside, "link", "set", port, "master", _node_bridge(plan, node)),
        ("ip", "-n", inside, "address", "add", f"{plan.address(rank)}/16", "dev", plan.interface(rank)),
        ("ip", "-n", inside, "link", "set", "lo", "up"),
    ]


def _bridge(namespace: str, name: str) -> list[Command]:
    return [
        ("ip", "-n", namespace, "link", "add", name, "mtu", str(_MTU), "type", "bridge"),
        ("ip", "-n", namespace, "link", "set", name, "addrgenmode", "none", "up"),
    ]


def _link(here: str, near: str, there: str, far: str, bit_s: int) -> list[Command]:
    """A veth pair between two namespaces, shaped at both ends."""
    pair = ("ip", "link", "add", near, "netns", here, "type", "veth", "peer", "name", far, "netns", there)
    return [pair, *_end(here, near, bit_s), *_end(there, far, bit_s)]


def _end(namespace: str, name: str, bit_s: int) -> list[Command]:
    # no IPv6: its neighbour discovery would be traffic of its own
    settings = ("mtu", str(_MTU), "gso_max_size", str(_SEGMENT), "gro_max_size", str(_SEGMENT), "addrgenmode", "none")
    shape = ("rate", f"{bit_s}bit", "burst", str(burst_bytes(bit_s)), "limit", str(_QUEUE))
    return [
        ("ip", "-n", namespace, "link", "set", name, *settings, "up"),
        ("tc", "-n", namespace, "qdisc", "add", "dev", name, "root", "tbf", *shape),
    ]
