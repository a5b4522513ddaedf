# SPDX-License-Identifier: Apache-2.0
"""Sliding windows: what of a server cannot share them is one line each, with the flag and the way out."""

import pytest

from banyan.features.windows.sliding import WindowFacts, window_refusals

BAD = {
    "has_sinks": True,
    "algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "steps_together": True,
    "deals_with_nodes": True,
    "keeps_arena": True,
    "asked_store": "mooncake",
    "num_slots": 68,
}


def test_windows_when_nothing_stands_against_them_then_they_are_shared():
    assert window_refusals(WindowFacts(architecture="MellumForCausalLM")) == []


@pytest.mark.parametrize("fact", BAD)
def test_windows_when_something_stands_against_them_then_one_line_names_it_and_the_way_out(fact):
    (line,) = window_refusals(WindowFacts(architecture="MellumForCausalLM", **{fact: BAD[fact]}))
    assert "MellumForCausalLM" in line and "--disable-hybrid-swa-memory" in line and "\n" not in line
    assert line.endswith("or --banyan-share off")


def test_windows_when_several_things_stand_against_them_then_each_has_a_line():
    assert len(window_refusals(WindowFacts(algorithm="NGRAM", keeps_arena=True))) == 2


def test_windows_when_there_is_a_gpu_then_they_are_shared_with_sinks_too():
    assert window_refusals(WindowFacts(device="cuda", has_sinks=True)) == []


def test_windows_when_drafts_run_on_a_gpu_then_they_are_refused_as_on_a_cpu():
    (line,) = window_refusals(WindowFacts(device="cuda", algorithm="EAGLE"))
    assert "--speculative-algorithm EAGLE" in line
