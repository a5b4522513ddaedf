# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from banyan.pacing.write_pause import WritePause
from banyan_lab.sim import tiers
from banyan_lab.sim.drives import SharedDrive, read_share
from banyan_lab.sim.engine import Simulation
from banyan_lab.sim.hardware import drive, write_weight
from banyan_lab.sim.tiers import Prefill, TieredGpu, Writes
from banyan_lab.sim.tutti import DRIVE, compute_s, prefill_cost, request
from banyan_lab.sim.tutti import tiers as named_tiers

MEASURED = ((8, 32, 203 / 1232), (8, 2, 996 / 1232), (8, 1, 1027 / 1232), (1, 32, 33 / 1351), (1, 1, 637 / 1351))
"""Read depth, write depth, share of the read bandwidth that was left: fio on one drive."""


@pytest.mark.parametrize(("read_depth", "write_depth", "left"), MEASURED)
def test_interference_when_measured_then_one_weight_explains_it(read_depth, write_depth, left):
    assert read_share(read_depth, write_depth, write_weight()) == pytest.approx(left, rel=0.08)


def test_drive_when_a_write_comes_and_goes_then_reads_slow_down_meanwhile():
    sim, ends = Simulation(), {}
    here = SharedDrive(sim, drive(DRIVE), read_depth=8, write_depth=8)
    here.read(29e9, lambda: ends.setdefault("read", sim.now_s))
    here.write(1e9, lambda: ends.setdefault("write", sim.now_s))
    sim.run()
    share = read_share(8, 8, write_weight())
    write_s = 1e9 / (12e9 * (1 - share))
    assert ends == pytest.approx({"write": write_s, "read": write_s + 1 - share * write_s})
    here.reads.audit()


def forwards(name, hit_share, number=1, **changes):
    gpu = TieredGpu(dataclasses.replace(named_tiers()[name], **changes), prefill_cost())
    return gpu.run([request(hit_share)] * number), gpu


def test_pipeline_when_compute_is_slower_then_only_the_first_layer_is_waited_for():
    """A closed form: the bubble is one layer's load."""
    (forward,), gpu = forwards("dram", 0.75)
    layer_s = request(0.75).prefix_tokens * prefill_cost().model.kv_bytes_per_token / 32 / 50e9
    assert forward.compute_s == pytest.approx(compute_s(request(0.75)))
    assert forward.bubble_s == pytest.approx(layer_s, rel=1e-6)
    assert gpu.io_s == pytest.approx(32 * layer_s, rel=1e-6)


def test_pipeline_when_loading_is_slower_then_only_the_last_layer_computes_behind_it():
    (forward,), gpu = forwards("paced", 0.99, writes=Writes.NONE)
    assert forward.total_s == pytest.approx(gpu.io_s + forward.compute_s / 32, rel=1e-6)


def test_tier_when_not_layerwise_then_all_of_the_load_is_a_bubble():
    (forward,), gpu = forwards("gds", 0.5)
    assert forward.bubble_s == pytest.approx(gpu.io_s)


def test_writes_when_paced_then_the_bubble_is_that_without_writes_and_all_is_written():
    without, _ = forwards("paced", 0.96, number=8, writes=Writes.NONE)
    paced, gpu = forwards("paced", 0.96, number=8)
    unpaced, _ = forwards("unpaced", 0.96, number=8)
    assert paced[-1].bubble_s == pytest.approx(without[-1].bubble_s, rel=0.02)
    assert unpaced[-1].bubble_s > 1.2 * paced[-1].bubble_s
    assert gpu.backlog_bytes == gpu.num_writing == gpu.dropped_bytes == 0
    written = gpu.drive.writes.bytes_done
    assert written == pytest.approx(8 * request(0.96).new_tokens * prefill_cost().model.kv_bytes_per_token, rel=1e-4)


def test_writes_when_the_pause_of_servers_is_taken_away_then_the_simulation_stops(monkeypatch):
    class Asked(Exception):
        pass

    def ask(self):
        raise Asked

    monkeypatch.setattr(WritePause, "begin_prefill", ask)
    with pytest.raises(Asked):
        forwards("paced", 0.5)


def test_writes_when_every_forward_reads_then_they_wait_for_a_pause():
    """As on a server: while a prefill waits for KV from the store, nothing is written."""
    tier = named_tiers()["paced"]
    gpu = TieredGpu(tier, prefill_cost())
    gpu.run([request(0.96)] * 8)
    back_to_back_s = gpu.drive.writes.busy_s
    new_bytes = 8 * request(0.96).new_tokens * prefill_cost().model.kv_bytes_per_token
    assert back_to_back_s == pytest.approx(new_bytes / tier.drive.write_bytes_per_s, rel=0.05), "no read beside them"


def test_backlog_when_full_then_what_comes_on_top_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(tiers, "BACKLOG_BYTES", 8 * tiers.WRITE_BLOCK_BYTES)
    _, gpu = forwards("paced", 0.5, number=2)
    assert gpu.dropped_bytes > 0 and gpu.backlog_bytes == 0
    total = 2 * request(0.5).new_tokens * prefill_cost().model.kv_bytes_per_token
    assert gpu.dropped_bytes + gpu.drive.writes.bytes_done == pytest.approx(total, rel=1e-3)


def test_prefill_when_nothing_is_cached_then_no_bubble():
    gpu = TieredGpu(named_tiers()["paced"], prefill_cost())
    (forward,) = gpu.run([Prefill(0, 4_096)])
    assert forward.bubble_s == pytest.approx(0.0, abs=1e-9)
