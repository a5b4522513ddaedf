# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan_lab.sim.pair import PairRates
from benchmark import pd_dual


def row(number, kind, ttft_s, prefill=0, decode=0, prompt=0, device=0):
    return {
        "round": number,
        "prompt": prompt,
        "kind": kind,
        "ttft_s": ttft_s,
        "read_bytes": {"prefill": prefill, "decode": decode},
        "details": {"device": device, "host": 1584 - device},
    }


def test_ratios_when_two_rounds_have_asked_every_prompt_both_ways_then_one_ratio_of_their_means(monkeypatch):
    monkeypatch.setattr(pd_dual, "NUM_ROUNDS", 4)
    rows = [row(0, "on", 1.0), row(0, "off", 4.0), row(1, "on", 2.0), row(1, "off", 2.0)]
    rows += [row(2, "on", 1.0), row(3, "off", 10.0)]
    rows += [row(2, "on", 0.1, prompt=1, device=1584), row(3, "off", 0.1, prompt=1)]
    assert pd_dual.ratios(rows) == [0.5, 0.1]


def test_balance_when_one_side_reads_more_then_its_part_to_the_mean():
    rows = [row(0, "on", 1.0, prefill=30, decode=10), row(1, "off", 1.0, prefill=1000)]
    assert pd_dual.balance(rows) == 1.5
    assert pd_dual.balance([row(0, "off", 1.0, prefill=1000)]) is None


def test_simulator_when_times_are_as_it_says_then_no_error_and_twice_the_ratio_is_an_error_of_half():
    rates = PairRates(prefill_tokens_per_s=2000, decode_tokens_per_s=40_000, without_reads_s=0.02, detour_s=0.01)
    asked = [row(number, kind, 0.0) for number, kind in enumerate(["on", "off"] * 2)]
    # Of the store 1,600 tokens: 0.8 s by the prefill server, 0.04 s by the decode server.
    rows = [{**each, "round": place} for place, each in enumerate(pd_dual.simulated(asked, rates))]
    assert [round(each["ttft_s"], 3) for each in rows] == [0.07, 0.82] * 2
    assert pd_dual.sim_error(rows, rates) == 0
    slower = [{**each, "ttft_s": each["ttft_s"] * (2 if each["kind"] == "on" else 1)} for each in rows]
    assert pd_dual.sim_error(slower, rates) == 0.5


def test_simulator_when_a_prompt_was_in_the_pool_then_it_reads_none_of_it():
    rates = PairRates(prefill_tokens_per_s=2000, decode_tokens_per_s=2000, without_reads_s=0.02)
    (said,) = pd_dual.simulated([row(0, "off", 0.3, device=1600)], rates)
    assert said["ttft_s"] == pytest.approx(0.02)


@pytest.mark.parametrize("name", list(pd_dual.LIMITED))
def test_setting_when_it_is_made_then_only_who_is_named_reads_slowly(name, monkeypatch, tmp_path):
    """And the flags are such as the servers take."""
    made = {}

    class Stop(Exception):
        pass

    def pair(label, share, model, logs, **more):
        made.update(more)
        raise Stop

    monkeypatch.setattr(pd_dual, "Pair", pair)
    with pytest.raises(Stop), pd_dual.started(name, tmp_path, tmp_path):
        pass
    for side in ("prefill", "decode"):
        is_limited = "--banyan-store-read-mb-per-s" in made[f"{side}_args"]
        assert is_limited == (side in pd_dual.LIMITED[name])
    assert ("--banyan-peers" in made["prefill_args"]) and ("--banyan-listen" in made["decode_args"])
    page_server = made["decode_args"][made["decode_args"].index("--banyan-listen") + 1]
    assert page_server in made["prefill_args"] and (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
