# SPDX-License-Identifier: Apache-2.0
import argparse
from pathlib import Path

from benchmark import prefill_stall


def test_summary_when_turns_repeat_then_median_and_range_by_label():
    turns = [
        {"label": label, "repetition": number, "longest_stall_s": stall}
        for label, stalls in (("no quota", (4.0, 5.0, 9.0)), ("quota 100 ms", (0.2, 0.1, 0.3)))
        for number, stall in enumerate(stalls)
    ]
    summary = prefill_stall.summarise(turns)
    assert summary["no quota"] == {
        "longest_stall_s:median": 5.0,
        "longest_stall_s:min": 4.0,
        "longest_stall_s:max": 9.0,
    }
    assert summary["quota 100 ms"]["longest_stall_s:median"] == 0.2


def test_specs_when_quotas_are_given_then_all_servers_share_the_profile_and_differ_in_the_quota_only():
    args = argparse.Namespace(profile=Path("p.json"), quota_ms=[400.0, 150.0])
    plain, *quotas = prefill_stall._specs(args)
    assert [spec.label for spec in quotas] == ["quota 400 ms", "quota 150 ms"]
    for spec, quota in zip(quotas, ("400.0", "150.0"), strict=True):
        assert spec.args == (*plain.args, "--banyan-prefill-quota-ms", quota)
    assert "--banyan-profile" in plain.args
