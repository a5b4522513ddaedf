# SPDX-License-Identifier: Apache-2.0
"""What is said of memory, processors and the container, from files of a kernel that a test has written."""

import pytest

from banyan import _native
from banyan.cli import doctor_machine
from banyan.cli.doctor_machine import Kernel, examine_machine

WELL = {
    "proc/meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nSwapTotal:             0 kB\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: x\nprocessor\t: 1\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/status": "Name:\tpython\nNSpid:\t7\nSeccomp:\t0\n",
    "proc/1/cgroup": "0::/init.scope\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "proc/sys/vm/zone_reclaim_mode": "0\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
}


@pytest.fixture
def found(tmp_path):
    """``found(what, path=text, ...)``: the finding on a machine that is well, but for these files."""

    def examine(what, **changed):
        for path, text in {**WELL, **changed}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return next(finding for finding in examine_machine(Kernel(tmp_path)) if finding.what == what)

    return examine


def test_machine_when_it_is_well_then_no_finding_has_advice(found, tmp_path):
    found("memory")
    assert [str(one) for one in examine_machine(Kernel(tmp_path)) if not one.is_ok or one.hint] == []
    assert len(examine_machine(Kernel(tmp_path))) == 10


def test_memory_when_it_is_told_then_what_the_arena_would_take_of_it(found, monkeypatch):
    monkeypatch.setattr(_native, "available_bytes", lambda: 8 << 30)
    assert "8.0 of 16.0 GiB free; the host arena would take 2.0 GiB" in found("memory").detail


def test_memory_when_proc_is_not_mounted_then_bad_and_the_way_out(tmp_path):
    finding = doctor_machine.memory(Kernel(tmp_path))
    assert not finding.is_ok and "mount /proc" in finding.advice


CASES = {
    "control group limit": (
        "memory of the control group",
        {"sys/fs/cgroup/memory.max": "4294967296\n"},
        "--banyan-host-gb",
    ),
    "swap": (
        "swap",
        {"proc/meminfo": WELL["proc/meminfo"].replace("SwapTotal:             0", "SwapTotal: 1048576")},
        "swapoff",
    ),
    "one processor": ("processors", {"proc/cpuinfo": "processor\t: 0\n"}, "two processors"),
    "a quota": ("processors", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, "two processors"),
    "control group limit of the older kind": (
        "memory of the control group",
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/box\n4:memory:/box/inner\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "4294967296\n",
        },
        "--banyan-host-gb",
    ),
    "a quota of the older kind": (
        "processors",
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/box/of/the/host\n4:memory:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        "two processors",
    ),
    "a quota of a group within": (
        "processors",
        {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"},
        "two processors",
    ),
    "two memory nodes": (
        "memory nodes",
        {"sys/devices/system/node/node0/x": "", "sys/devices/system/node/node1/x": ""},
        "SGLANG_NUMA_BIND_V2",
    ),
    "reclaim": ("memory nodes", {"proc/sys/vm/zone_reclaim_mode": "1\n"}, "vm.zone_reclaim_mode=0"),
    "slow clock": (
        "clock",
        {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n"},
        "clocksource=tsc",
    ),
    "docker": ("container", {".dockerenv": ""}, "one container"),
    "kubernetes": ("container", {"proc/1/cgroup": "0::/kubepods.slice/x\n"}, "one container"),
    "PID namespace": ("PID namespace", {"proc/self/status": "NSpid:\t70\t1\n"}, "same one"),
    "seccomp": ("system calls", {"proc/self/status": "Seccomp:\t2\n"}, "memfd_create"),
}


@pytest.mark.parametrize("case", CASES)
def test_machine_when_something_is_to_be_minded_then_a_note_with_the_way_out(found, case):
    what, changed, way_out = CASES[case]
    finding = found(what, **changed)
    assert finding.is_ok and way_out in finding.hint
    assert str(finding).startswith("note ") and way_out in str(finding)


def test_overcommit_when_the_kernel_never_does_then_bad_and_the_way_out(found):
    finding = found("overcommit", **{"proc/sys/vm/overcommit_memory": "2\n"})
    assert not finding.is_ok and "sysctl vm.overcommit_memory=0" in str(finding)


def test_machine_when_groups_of_the_older_kind_limit_nothing_then_all_of_it_counts(found):
    free = {
        "proc/self/cgroup": "9:cpu,cpuacct:/\n4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert found("memory of the control group", **free).detail == "no limit below the machine's"
    assert found("processors").detail == "2"


def test_limit_when_groups_are_nested_then_the_tightest_counts(tmp_path):
    for path, text in (("", "max"), ("a/", "900"), ("a/b/", "max")):
        (tmp_path / "sys/fs/cgroup" / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / path / "memory.max").write_text(text)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    assert Kernel(tmp_path).memory_limit("memory.max") == 900
    assert Kernel(tmp_path).memory_limit("memory.swap.max") is None
