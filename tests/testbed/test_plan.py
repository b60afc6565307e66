"""A scale model as text: names, addresses, commands."""

from __future__ import annotations

import ipaddress
import subprocess
import sys

import pytest

from hybridpar.testbed.plan import Plan, PlanError, burst_bytes, caution, down_commands, up_commands


def _plan(**changes: object) -> Plan:
    fields = {
        "nodes": 2,
        "devices_per_node": 2,
        "intra_bit_s": 800_000_000,
        "inter_bit_s": 100_000_000,
        "device_share": 0.4,
        "testbed_id": "0a1b2c",
    }
    return Plan(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_commands_that_bring_the_smallest_testbed_up() -> None:
    mtu = "mtu 9000 gso_max_size 16384 gro_max_size 16384 addrgenmode none up"
    intra = "root tbf rate 800000000bit burst 20000 limit 33554432"
    inter = "root tbf rate 100000000bit burst 9500 limit 33554432"
    lines = [" ".join(command) for command in up_commands(_plan(nodes=1, devices_per_node=1))]
    assert lines == [
        "ip netns add hp0a1b2c-r0",
        "ip netns add hp0a1b2c-n0",
        "ip netns add hp0a1b2c-spine",
        "ip -n hp0a1b2c-spine link add hp0a1b2cs mtu 9000 type bridge",
        "ip -n hp0a1b2c-spine link set hp0a1b2cs addrgenmode none up",
        "ip -n hp0a1b2c-n0 link add hp0a1b2cb0 mtu 9000 type bridge",
        "ip -n hp0a1b2c-n0 link set hp0a1b2cb0 addrgenmode none up",
        "ip link add hp0a1b2cu0 netns hp0a1b2c-n0 type veth peer name hp0a1b2cd0 netns hp0a1b2c-spine",
        f"ip -n hp0a1b2c-n0 link set hp0a1b2cu0 {mtu}",
        f"tc -n hp0a1b2c-n0 qdisc add dev hp0a1b2cu0 {inter}",
        f"ip -n hp0a1b2c-spine link set hp0a1b2cd0 {mtu}",
        f"tc -n hp0a1b2c-spine qdisc add dev hp0a1b2cd0 {inter}",
        "ip -n hp0a1b2c-n0 link set hp0a1b2cu0 master hp0a1b2cb0",
        "ip -n hp0a1b2c-spine link set hp0a1b2cd0 master hp0a1b2cs",
        "ip link add hp0a1b2cr0 netns hp0a1b2c-r0 type veth peer name hp0a1b2cp0 netns hp0a1b2c-n0",
        f"ip -n hp0a1b2c-r0 link set hp0a1b2cr0 {mtu}",
        f"tc -n hp0a1b2c-r0 qdisc add dev hp0a1b2cr0 {intra}",
        f"ip -n hp0a1b2c-n0 link set hp0a1b2cp0 {mtu}",
        f"tc -n hp0a1b2c-n0 qdisc add dev hp0a1b2cp0 {intra}",
        "ip -n hp0a1b2c-n0 link set hp0a1b2cp0 master hp0a1b2cb0",
        "ip -n hp0a1b2c-r0 address add 10.77.0.1/16 dev hp0a1b2cr0",
        "ip -n hp0a1b2c-r0 link set lo up",
    ]


def test_every_link_is_shaped_at_both_ends() -> None:
    plan = _plan(nodes=3, devices_per_node=4)
    commands = up_commands(plan)
    ends = [word for c in commands if "veth" in c for word in (c[3], c[c.index("name") + 1])]
    shaped = {c[c.index("dev") + 1]: c[c.index("rate") + 1] for c in commands if c[0] == "tc"}
    assert len(ends) == 2 * (3 + 12)
    assert sorted(shaped) == sorted(ends)
    uplinks = {name for name, rate in shaped.items() if rate == "100000000bit"}
    assert uplinks == {f"hp0a1b2c{end}{node}" for end in "ud" for node in range(3)}


def test_nothing_is_made_in_the_machines_own_namespace() -> None:
    for command in up_commands(_plan()):
        assert command[:3] == ("ip", "netns", "add") or "-n" in command or command.count("netns") == 2


def test_names_are_unique_and_short_enough_for_the_kernel() -> None:
    plan = _plan(nodes=16, devices_per_node=16)
    links = [c[3] for c in up_commands(plan) if "veth" in c]
    assert len(set(links)) == len(links) == 16 + 256
    assert all(len(name) <= 15 and name.startswith(plan.prefix) for name in links)
    assert len(set(plan.namespaces)) == 256 + 16 + 1


def test_two_plans_share_no_name() -> None:
    first, second = (
        Plan(nodes=1, devices_per_node=2, intra_bit_s=10**8, inter_bit_s=10**8, device_share=0.5) for _ in range(2)
    )
    assert not set(first.namespaces) & set(second.namespaces)


def test_ranks_fill_one_node_after_the_other() -> None:
    plan = _plan(nodes=2, devices_per_node=3)
    assert [plan.node_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    addresses = [plan.address(rank) for rank in range(6)]
    assert addresses[:4] == ["10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.1.1"]
    with pytest.raises(PlanError, match=r"rank=6 is not on the testbed; legal: 0 to 5"):
        plan.node_of(6)


@pytest.mark.parametrize("shape", [(250, 1), (1, 250), (16, 16)])
def test_addresses_of_the_largest_testbeds_are_legal_and_differ(shape: tuple[int, int]) -> None:
    plan = _plan(nodes=shape[0], devices_per_node=shape[1])
    addresses = {ipaddress.ip_address(plan.address(rank)) for rank in range(plan.world)}
    assert len(addresses) == plan.world
    assert all(address in ipaddress.ip_network("10.77.0.0/16") for address in addresses)


def test_what_takes_it_down() -> None:
    plan = _plan(nodes=1, devices_per_node=1)
    assert [" ".join(command) for command in down_commands(plan.namespaces)] == [
        "ip netns del hp0a1b2c-r0",
        "ip netns del hp0a1b2c-n0",
        "ip netns del hp0a1b2c-spine",
    ]


def test_a_burst_is_a_fifth_of_a_millisecond_but_never_less_than_a_frame() -> None:
    assert burst_bytes(8_000_000_000) == 200_000
    assert burst_bytes(1_000_000) == 9_500


def test_the_label_says_what_times_depend_on() -> None:
    assert _plan().label == "scale-2x2-800M-100M-share0.4"
    assert _plan(inter_bit_s=50_500_000).label == "scale-2x2-800M-50.5M-share0.4"


def test_devices_that_ask_for_more_cores_than_there_are_get_a_caution() -> None:
    assert caution(_plan(device_share=0.5), 2) is None
    assert caution(_plan(device_share=0.6), 2) == (
        "4 devices of testbed.device_share=0.6 ask for 2.4 cores and there are 2: they will be slower than asked; "
        "a share of 0.5 would fit"
    )


def test_a_plan_comes_back_from_json() -> None:
    plan = _plan(device_memory_bytes=1 << 20)
    assert Plan.from_json(plan.as_json()) == plan
    with pytest.raises(PlanError, match="unexpected keyword argument 'colour'"):
        Plan.from_json({**plan.as_json(), "colour": "red"})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nodes": 0}, "testbed.nodes=0 is not legal; legal: a whole number from 1 to 250"),
        ({"devices_per_node": 2.0}, "testbed.devices_per_node=2.0 is not legal; legal: a whole number from 1 to 250"),
        ({"intra_bit_s": 10}, "testbed.intra_bit_s=10 is not legal; legal: a whole number from 1e+06 to 1e+11"),
        ({"inter_bit_s": True}, "testbed.inter_bit_s=True is not legal"),
        ({"device_share": 0}, "testbed.device_share=0 is not legal; legal: a number from 0.01 to 64"),
        ({"device_share": float("nan")}, "testbed.device_share=nan is not legal"),
        ({"device_memory_bytes": -1}, "testbed.device_memory_bytes=-1 is not legal"),
        ({"nodes": 250, "devices_per_node": 2}, "are 500 ranks; legal: at most 256"),
        ({"testbed_id": "x; rm"}, "testbed.testbed_id='x; rm' is not legal; legal: six of the digits 0-9 and a-f"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError) as refused:
        _plan(**changes)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(PlanError) as refused:
        _plan(nodes=0, device_share=100)
    assert len(str(refused.value).splitlines()) == 2


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, hybridpar.testbed.commands, hybridpar.testbed.pool; "
        "sys.exit(any(name == 'torch' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
