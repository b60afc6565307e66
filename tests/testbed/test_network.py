"""Testbeds of the real kernel: brought up, entered, and gone whatever happens to their owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridpar.launch.forked import RankExit, fork_ranks, preload, values
from hybridpar.testbed import network, quota
from hybridpar.testbed.plan import Plan
from tests.launch.processes import lives, wait_for
from tests.testbed.left import left_of


def test_it_is_there_inside_the_block_and_gone_after_it(plan: Plan, registry: Path) -> None:
    with network.owned(plan, registry) as testbed:
        (entry,) = network.entries(registry)
        assert (entry.standing, entry.owner_pid, entry.plan) == ("owned", os.getpid(), plan)
        assert set(entry.namespaces) == set(plan.namespaces)
        assert quota.quota_now(testbed.hierarchy, plan.prefix, 3) == quota.Quota(1500, 5000)
    assert network.entries(registry) == ()
    assert left_of(plan) == []


def _interfaces() -> list[str]:
    told = subprocess.run(["ip", "-br", "address"], capture_output=True, text=True, check=True).stdout
    return [f"{line.split()[0].split('@')[0]} {line.split()[2]}" for line in told.splitlines()]


def test_a_rank_sees_its_own_interface_and_no_other(plan: Plan, registry: Path, tmp_path: Path) -> None:
    with network.owned(plan, registry) as testbed:
        exits = fork_ranks(4, lambda _: _interfaces(), deadline_s=20, log_dir=tmp_path, enter=testbed.enter)
    assert values(exits) == [["lo 127.0.0.1/8", f"{plan.interface(rank)} {plan.address(rank)}/16"] for rank in range(4)]


def _namespace() -> str:
    return str(Path("/proc/self/ns/net").readlink())


def test_the_launcher_stays_where_it_was(plan: Plan, registry: Path, tmp_path: Path) -> None:
    before = _namespace(), os.environ.get("GLOO_SOCKET_IFNAME")
    with network.owned(plan, registry) as testbed:
        fork_ranks(1, lambda _: None, deadline_s=20, log_dir=tmp_path, enter=testbed.enter)
        assert (_namespace(), os.environ.get("GLOO_SOCKET_IFNAME")) == before


def test_a_rank_that_is_not_on_the_testbed_fails_with_a_sentence(plan: Plan, registry: Path, tmp_path: Path) -> None:
    with network.owned(plan, registry) as testbed:
        exits = fork_ranks(
            1, lambda _: None, deadline_s=20, log_dir=tmp_path, enter=lambda _: testbed.enter(4)
        )  # fmt: skip
    assert "TestbedError: rank=4 is not on the testbed; legal: 0 to 3" in exits[0].log_tail


def _all_reduce(rank: int, store: Path) -> float:
    import torch
    import torch.distributed as dist

    from hybridpar.comm import process_group

    torch.set_num_threads(1)
    process_group.start(rank, 4, store, "cpu", 20)
    total = torch.full((1000,), float(rank + 1))
    dist.all_reduce(total)
    process_group.stop()
    return total[-1].item()


def test_ranks_meet_in_a_file_and_talk_over_the_shaped_links(plan: Plan, registry: Path, tmp_path: Path) -> None:
    preload()
    with network.owned(plan, registry) as testbed:
        exits = fork_ranks(
            4, lambda rank: _all_reduce(rank, tmp_path / "store"), deadline_s=30, log_dir=tmp_path / "logs",
            enter=testbed.enter,
        )  # fmt: skip
        through = _bytes_sent(plan)
    assert values(exits) == [10.0] * 4
    assert through > 4000, "bytes crossed the uplink of node 0"


def _bytes_sent(plan: Plan) -> int:
    told = subprocess.run(
        ["ip", "-n", plan.node_namespace(0), "-s", "-j", "link", "show", f"{plan.prefix}u0"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(json.loads(told.stdout)[0]["stats64"]["tx"]["bytes"])


def test_two_at_once_do_not_collide(plan: Plan, registry: Path) -> None:
    other = Plan(nodes=1, devices_per_node=2, intra_bit_s=10**8, inter_bit_s=10**8, device_share=0.2)
    with network.owned(plan, registry):
        with network.owned(other, registry):
            assert {entry.testbed_id for entry in network.entries(registry)} == {plan.testbed_id, other.testbed_id}
        assert left_of(other) == []
        (entry,) = network.entries(registry)
        assert set(entry.namespaces) == set(plan.namespaces)


def test_the_name_of_a_standing_testbed_is_refused_and_the_testbed_stays(plan: Plan, registry: Path) -> None:
    with network.owned(plan, registry):
        with pytest.raises(network.TestbedError, match="is up already"), network.owned(plan, registry):
            pass
        assert len(network.entries(registry)[0].namespaces) == len(plan.namespaces)


def test_a_failure_inside_takes_it_down(plan: Plan, registry: Path) -> None:
    with pytest.raises(ZeroDivisionError), network.owned(plan, registry):
        1 / 0  # noqa: B018
    assert left_of(plan) == []


def test_a_failure_while_it_is_built_leaves_nothing(
    plan: Plan, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = network.up_commands

    def wrong(plan: Plan) -> tuple[tuple[str, ...], ...]:
        return (*real(plan)[:20], ("ip", "netns", "add", plan.namespaces[0]))

    monkeypatch.setattr(network, "up_commands", wrong)
    for bring_up in (lambda: network.keep(plan, registry), lambda: network.owned(plan, registry).__enter__()):
        with pytest.raises(network.TestbedError, match=r"`ip netns add hp\w+-r0` failed: .*File exists"):
            bring_up()
        assert left_of(plan) == []
        assert network.entries(registry) == ()


_OWNER = """
import sys, time
from pathlib import Path
from hybridpar.launch.forked import fork_ranks
from hybridpar.testbed import network
from hybridpar.testbed.plan import Plan
folder = Path(sys.argv[1])
def body(rank):
    (folder / f"rank-{rank}.tmp").write_text(str(__import__("os").getpid()))
    (folder / f"rank-{rank}.tmp").rename(folder / f"rank-{rank}")
    time.sleep(60)
plan = Plan(2, 2, 400_000_000, 100_000_000, 0.3, testbed_id=sys.argv[3])
with network.owned(plan, Path(sys.argv[2])) as testbed:
    fork_ranks(4, body, deadline_s=60, log_dir=folder / "logs", enter=testbed.enter)
"""


def _owner(plan: Plan, folder: Path, registry: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    arguments = [sys.executable, "-c", _OWNER, str(folder), str(registry), plan.testbed_id]
    return subprocess.Popen(arguments, stderr=subprocess.DEVNULL)


def _ranks_run(folder: Path) -> bool:
    return all((folder / f"rank-{rank}").exists() for rank in range(4))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_owner_takes_it_down(
    plan: Plan, registry: Path, tmp_path: Path, number: signal.Signals
) -> None:
    owner = _owner(plan, tmp_path / "owner", registry)
    assert wait_for(lambda: _ranks_run(tmp_path / "owner"), 20)
    owner.send_signal(number)
    owner.wait(10)
    assert left_of(plan) == []
    assert network.entries(registry) == ()


def test_what_a_killed_owner_left_is_seen_and_removed_by_the_next_start(
    plan: Plan, registry: Path, tmp_path: Path
) -> None:
    owner = _owner(plan, tmp_path / "owner", registry)
    assert wait_for(lambda: _ranks_run(tmp_path / "owner"), 20)
    ranks = [int((tmp_path / "owner" / f"rank-{rank}").read_text()) for rank in range(4)]
    assert set(ranks) <= set(network.entries(registry)[0].members)
    owner.kill()
    owner.wait(10)
    assert wait_for(lambda: not any(map(lives, ranks)), 5)
    (entry,) = network.entries(registry)
    assert entry.standing == "left"
    assert left_of(plan)
    with pytest.raises(network.TestbedError, match="is not up; legal: there is no testbed"):
        network.standing(plan.testbed_id, registry)
    other = Plan(nodes=1, devices_per_node=1, intra_bit_s=10**8, inter_bit_s=10**8, device_share=0.2)
    with network.owned(other, registry):
        assert left_of(plan) == []
        assert [entry.testbed_id for entry in network.entries(registry)] == [other.testbed_id]


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.25])
def test_an_owner_killed_while_building_is_cleaned_up_after(
    plan: Plan, registry: Path, tmp_path: Path, after_s: float
) -> None:
    owner = _owner(plan, tmp_path / "owner", registry)
    assert wait_for(lambda: bool(network.entries(registry)), 20)
    with pytest.raises(subprocess.TimeoutExpired):
        owner.wait(after_s)
    owner.kill()
    owner.wait(10)
    assert network.sweep(registry) == (plan.testbed_id,)
    assert left_of(plan) == []


_IN_THE_MIDDLE = """
import fcntl, subprocess, sys, time
held = open(sys.argv[1], "w")
fcntl.flock(held, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(0.5)
subprocess.run(["ip", "netns", "add", sys.argv[2]], check=True)
"""


def test_a_command_that_a_killed_owner_left_in_its_middle_is_waited_for(plan: Plan, registry: Path) -> None:
    registry.mkdir()
    (registry / f"{plan.testbed_id}.json").write_text(json.dumps({"plan": plan.as_json(), "owner": {}}))
    arguments = [str(registry / f"{plan.testbed_id}.held"), plan.namespace(0)]
    command = subprocess.Popen([sys.executable, "-c", _IN_THE_MIDDLE, *arguments], stdout=subprocess.PIPE)
    assert command.stdout is not None
    assert command.stdout.readline() == b"locked\n"
    assert network.sweep(registry) == (plan.testbed_id,)
    assert command.wait(10) == 0, "it was left to end"
    assert left_of(plan) == []
    assert list(registry.glob(f"{plan.testbed_id}*")) == []


def test_a_torn_state_file_still_names_what_to_remove(plan: Plan, registry: Path) -> None:
    network.keep(plan, registry)
    (registry / f"{plan.testbed_id}.json").write_text('{"plan": {"no')
    assert network.entries(registry)[0].standing == "left"
    assert network.sweep(registry) == (plan.testbed_id,)
    assert left_of(plan) == []


def test_a_process_number_that_was_given_again_is_no_owner(plan: Plan, registry: Path) -> None:
    network.keep(plan, registry)
    path = registry / f"{plan.testbed_id}.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "owner": {"pid": os.getpid(), "started": 1, "boot": "another"}}))
    assert network.entries(registry)[0].standing == "left"


def test_a_living_owner_keeps_a_testbed_whose_plan_nobody_understands(plan: Plan, registry: Path) -> None:
    with network.owned(plan, registry):
        path = registry / f"{plan.testbed_id}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "plan": {"shape": "a torus"}}))
        assert network.sweep(registry) == ()
        (entry,) = network.entries(registry)
        assert (entry.standing, entry.plan) == ("owned", None)


def test_a_kept_testbed_stands_until_it_is_taken_down(plan: Plan, registry: Path) -> None:
    network.keep(plan, registry)
    assert network.sweep(registry) == ()
    assert network.standing(plan.testbed_id, registry).plan == plan
    network.down(plan.testbed_id, registry)
    assert left_of(plan) == []
    with pytest.raises(network.TestbedError, match=r"testbed='\w+' is unknown; legal: there is no testbed"):
        network.down(plan.testbed_id, registry)


def test_children_that_a_rank_left_behind_do_not_hold_it(plan: Plan, registry: Path, tmp_path: Path) -> None:
    def leave_a_child(_rank: int) -> int:
        return subprocess.Popen(["sleep", "60"], start_new_session=True).pid

    with network.owned(plan, registry) as testbed:
        exits = fork_ranks(1, leave_a_child, deadline_s=20, log_dir=tmp_path, enter=testbed.enter)
        (child,) = values(exits)
        assert lives(child)
    assert wait_for(lambda: not lives(child), 5)
    assert left_of(plan) == []


def test_without_the_right_to_it_a_sentence_offers_the_plain_testbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda program: f"/sbin/{program}")
    monkeypatch.setattr(network, "_effective_capabilities", lambda: 1 << 21)
    assert network.lacking() == (
        "the scale model makes network namespaces and needs CAP_NET_ADMIN, which this process lacks; run as root, "
        "or choose the plain testbed (unshaped loopback, not comparable with a scale model)"
    )


def test_without_its_programs_a_sentence_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda program: None)
    assert network.lacking() == "the scale model needs the program ip, which is not here; install iproute2"


def test_without_the_right_to_it_nothing_is_tried(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "lacking", lambda: "not here")
    with pytest.raises(network.TestbedError, match="not here"):
        network.keep(plan, tmp_path / "registry")
    assert not (tmp_path / "registry").exists()


def test_the_plain_testbed_is_marked_so_and_leads_nowhere(tmp_path: Path) -> None:
    plain = network.PlainTestbed()
    assert plain.label == "plain-loopback"
    here = _namespace()
    exits: tuple[RankExit, ...] = fork_ranks(
        1, lambda _: _namespace(), deadline_s=20, log_dir=tmp_path, enter=plain.enter
    )
    assert values(exits) == [here]
