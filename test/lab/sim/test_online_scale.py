# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan_lab.sim.online_scale import LARGE_RATE, NUM_GROUPS, SMALL_RATE, OnlineScale


class Rated(OnlineScale):
    """A cluster that serves ``most_tenths`` tenths of what its groups serve alone."""

    most_tenths = 12

    def _meets(self, small_rate, tenths):
        return tenths <= self.most_tenths


@pytest.mark.parametrize("tenths", [7, 10, 12])
def test_multiple_when_the_cluster_serves_so_much_then_found(monkeypatch, tenths):
    monkeypatch.setattr(Rated, "most_tenths", tenths)
    assert Rated(num_groups=20).multiple(0.5) == pytest.approx(2 * tenths)


def test_rates_when_compared_then_the_published_ones_are_22_times_apart():
    assert pytest.approx(NUM_GROUPS) == LARGE_RATE / SMALL_RATE


def test_scale_when_two_groups_are_played_then_latencies_are_those_of_one():
    """Fifty seconds of two groups; the published figures are compared for 22 only."""
    study = OnlineScale(num_groups=2, warm_s=20.0, run_s=50.0, workload="agents-32k")
    small, large = study.served(1, 0.4), study.served(2, 0.8)
    assert large.num_turns == pytest.approx(2 * small.num_turns, rel=0.15)
    assert large.tpot_s == pytest.approx(small.tpot_s, rel=0.1)
    assert large.ttft_s == pytest.approx(small.ttft_s, rel=0.3)
