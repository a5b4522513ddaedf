# SPDX-License-Identifier: Apache-2.0
"""What ``banyan doctor --peer`` says of a path that was tried."""

from dataclasses import replace

import pytest

from banyan.cli import main
from banyan.cli.doctor_peer import examine_path
from banyan.core import Address
from banyan.features.nodes.path import Path, Rate

MB = 1_000_000
GOOD = Path(
    Address("10.0.0.2", 7400),
    answers_s=(0.0002, 0.0003, 0.0004),
    rates=(Rate(1 << 16, 0.001), Rate(64 << 20, (64 << 20) / (1100 * MB))),
    num_segments=40_000,
    segment_bytes=8948,
    link_mbit=10_000,
)


def test_path_when_it_is_well_then_both_rows_say_what_it_carries():
    answers, moved = examine_path(GOOD)
    assert answers.is_ok and "answers in 0.30 ms (at most 0.40)" in answers.detail
    assert moved.is_ok and "64 MiB at 1100 MB/s" in moved.detail and "packets of 8948 bytes" in moved.detail
    assert moved.hint == ""


@pytest.mark.parametrize(
    ("change", "said", "advice"),
    [
        ({"obstacle": "port 7400: Connection refused"}, "Connection refused", "--banyan-listen"),
        ({"obstacle": "it does not let this node in"}, "does not let", "--banyan-secret-file"),
        ({"bytes_obstacle": "port 7401: Connection refused", "rates": ()}, "port 7401", "both ports"),
        ({"num_early": 100}, "100 of 40000 packets", "lost"),
    ],
)
def test_path_when_something_is_in_its_way_then_it_is_named_with_what_to_do(change, said, advice):
    last = examine_path(replace(GOOD, **change))[-1]
    assert not last.is_ok and said in last.detail and advice in last.advice


@pytest.mark.parametrize(
    ("rate_mb", "answer_s", "link_mbit", "hint"),
    [
        (40, 0.010, 10_000, "--banyan-in-flight-kb"),
        (40, 0.010, 0, "--banyan-in-flight-kb"),
        (100, 0.0003, 10_000, "could carry 1250 MB/s"),
        (100, 0.0003, 0, ""),
        (100, 0.0003, 1_000, ""),
    ],
    ids=["far away", "far away, card unknown", "slow beside its card", "card unknown", "as its card"],
)
def test_path_when_it_carries_less_than_it_could_then_the_likeliest_reason(rate_mb, answer_s, link_mbit, hint):
    slow = replace(
        GOOD, rates=(Rate(64 << 20, (64 << 20) / (rate_mb * MB)),), answers_s=(answer_s,), link_mbit=link_mbit
    )
    moved = examine_path(slow)[-1]
    assert moved.is_ok and hint in moved.hint and bool(hint) == bool(moved.hint)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--peer", "10.0.0.2:7400"], "--secret-file"), (["--peer", "nowhere", "--secret-file", "x"], "HOST:PORT")],
)
def test_doctor_when_a_peer_cannot_be_tried_then_one_line_says_why(capsys, words, said):
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err
