# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmark import own_network, pd_slow


def found(*, fast, slow, transfer_s, next_turn_bytes):
    return {
        "fast_ttft_s": fast,
        "slow_ttft_s": slow,
        "transfer_s": transfer_s,
        "next_turn_bytes": next_turn_bytes,
    }


@pytest.mark.parametrize(
    ("compute_s", "transfer_s", "ttft_s", "share"), [(4.0, 2.0, 4.0, 0.0), (4.0, 2.0, 6.0, 1.0), (1.0, 2.0, 2.1, 0.1)]
)
def test_exposed_share_when_one_hides_the_other_then_zero_and_when_none_does_then_one(
    compute_s, transfer_s, ttft_s, share
):
    assert pd_slow.exposed_share(ttft_s=ttft_s, compute_s=compute_s, transfer_s=transfer_s) == pytest.approx(share)


def test_figures_when_both_kinds_were_asked_then_neighbours_and_bytes_are_compared():
    kinds = {
        "on": found(fast=[4.0, 4.0, 5.0], slow=[4.2, 4.0, 6.0], transfer_s=2.0, next_turn_bytes=50),
        "off": found(fast=[4.0], slow=[6.0], transfer_s=2.0, next_turn_bytes=1000),
    }
    figures = pd_slow.figures(kinds)
    assert figures["exposed_transfer_share"] == 0.1 and figures["exposed_transfer_share_stock"] == 1.0
    assert figures["handover_wire_ratio"] == 0.05
    assert figures["slow"]["kinds"] == kinds


def test_network_when_it_is_the_machines_own_then_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(own_network, "_output", lambda *command: '[{"ifname": "lo"}, {"ifname": "eth0"}]')
    monkeypatch.setattr(own_network, "_run", lambda *command: pytest.fail(f"ran {command}"))
    with pytest.raises(RuntimeError, match="not its own"):
        own_network.SlowPorts()
    with pytest.raises(RuntimeError, match="not its own"):
        own_network.TrafficClasses(link_mbit=1000, low_dscp=8)


def test_bytes_when_tc_tells_of_several_classes_then_those_of_the_slow_one(monkeypatch):
    told = """class htb 1:10 root prio 0 rate 20Gbit ceil 20Gbit burst 256k cburst 256k
 Sent 77 bytes 1 pkt (dropped 0, overlimits 0 requeues 0)
class htb 1:20 root prio 0 rate 200Mbit ceil 200Mbit burst 256k cburst 256k
 Sent 33596278 bytes 560 pkt (dropped 0, overlimits 0 requeues 0)
"""
    monkeypatch.setattr(own_network, "_output", lambda *command: told)
    slow = own_network.SlowPorts.__new__(own_network.SlowPorts)
    assert slow.num_bytes() == 33596278


def test_run_when_it_goes_into_a_network_of_its_own_then_by_unshare(monkeypatch, tmp_path):
    class Done:
        returncode = 3

    ran = []
    monkeypatch.setattr(own_network.subprocess, "run", lambda command: ran.append(command) or Done())
    assert own_network.run_inside("a.module", ["--out", "here"]) == 3
    assert ran[0][:2] == ["unshare", "--net"] and ran[0][-4:] == ["-m", "a.module", "--out", "here"]
    monkeypatch.setattr(own_network, "run_inside", lambda module, args: 1)
    with pytest.raises(RuntimeError, match="nothing was measured"):
        pd_slow.measure(tmp_path, 0)
