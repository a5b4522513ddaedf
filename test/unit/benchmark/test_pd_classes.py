# SPDX-License-Identifier: Apache-2.0
import os

from benchmark import own_network, pd_classes
from benchmark.own_network import Ends


def row(idle, marked, unmarked, rate):
    """Bounded pulls in the middle of the two others, and slower than they."""
    return {
        "idle_p99_us": idle,
        "marked_p99_us": marked,
        "copying_p99_us": 1.1 * idle,
        "bounded_p99_us": (marked + unmarked) / 2,
        "unmarked_p99_us": unmarked,
        "marked_bytes_per_s": rate,
        "bounded_bytes_per_s": rate / 2,
        "unmarked_bytes_per_s": rate,
    }


def test_figures_when_rounds_differ_then_medians_of_their_ratios():
    rows = [row(100, 120, 900, 115e6), row(200, 200, 2000, 110e6), row(100, 400, 500, 120e6)]
    found = pd_classes.figures(rows)
    assert (found["high_class_p99_ratio"], found["high_class_p99_ratio_unmarked"]) == (1.2, 9.0)
    assert (found["high_class_p99_ratio_bounded"], found["high_class_p99_ratio_copying"]) == (5.1, 1.1)
    assert (found["pulls_path_share"], found["pulls_path_share_bounded"]) == (0.92, 0.46)


def test_messages_when_nothing_is_beside_them_then_each_has_a_time():
    with pd_classes.Messages(Ends()) as messages:
        times_us = messages.times_us(0.05)
    assert times_us and min(times_us) > 0


def test_pulls_when_they_run_then_bytes_come(monkeypatch):
    monkeypatch.setattr(pd_classes, "SETTLE_S", 0.0)
    with pd_classes.pulling(Ends(), pd_classes.LOW_DSCP, pd_classes.IN_FLIGHT_BYTES) as num_bytes:
        assert num_bytes.value > 0


def test_path_when_it_is_made_then_frames_and_classes_are_those_of_both_ends(monkeypatch):
    ran = []
    monkeypatch.setattr(own_network, "_begin", lambda: None)
    monkeypatch.setattr(own_network, "_wait_for_network_of", lambda pid: None)
    monkeypatch.setattr(own_network.subprocess, "Popen", Popen)
    monkeypatch.setattr(own_network, "_run", lambda *command: ran.append(" ".join(command)))
    with own_network.classed_path(link_mbit=1000, low_dscp=8, frame_bytes=3000) as ends:
        assert (ends.near, ends.far, ends.far_pid) == (*own_network.ENDS, Popen.pid)
    for device, before in (("near", ""), ("far", "nsenter --net=/proc/77/ns/net ")):
        assert f"{before}ip link set {device} mtu 3000 gso_max_segs 1 up" in ran
        (low,) = [
            line for line in ran if line.startswith(before + "tc class") and f"dev {device} " in line and "1:20" in line
        ]
        assert "rate 10mbit ceil 1000mbit" in low and low.endswith("prio 1")
        assert any("tos 0x20" in line and f"dev {device} " in line for line in ran)


class Popen:
    pid = 77

    def __init__(self, command, stdin):
        assert command[:2] == ["unshare", "--net"]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_end_when_there_is_no_other_network_then_it_stays_in_this_one():
    before = os.readlink("/proc/self/ns/net")
    Ends().go_far()
    assert os.readlink("/proc/thread-self/ns/net") == before
