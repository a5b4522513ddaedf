# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmark import remote, remote_link

LINK = [{"pull_s": 0.06, "transfer_s": 0.05, "first_layer_s": 0.005, "nixl_s": 0.04}]


def row(repeat, remote_s, compute_s, *, tokens=1984, is_identical=True):
    return {
        "repeat": repeat,
        "prompt": 0,
        "remote_s": remote_s,
        "compute_s": compute_s,
        "remote_tokens": tokens,
        "is_identical": is_identical,
    }


def test_summary_when_repeats_differ_then_the_ratio_is_within_each_and_the_worst_share_counts():
    found = remote.summarise([row(0, 1.0, 4.0), row(0, 3.0, 4.0), row(1, 1.0, 2.0, tokens=0)], LINK)
    assert found["remote_ttft_ratio"]["values"] == [0.5, 0.5]
    assert found["remote_token_share"] == 0 and found["outputs_identical"] and found["num_compared"] == 3
    assert found["remote_first_layer_share"]["median"] == pytest.approx(0.1)


def test_rate_when_it_is_compared_with_nixl_then_both_clocks_begin_before_the_request_is_made():
    assert remote_link.figures(LINK)["remote_rate_to_nixl"] == [pytest.approx(0.04 / 0.06)]


def test_summary_when_one_answer_differs_then_outputs_are_not_identical():
    assert not remote.summarise([row(0, 1.0, 4.0), row(0, 1.0, 4.0, is_identical=False)], LINK)["outputs_identical"]


def test_page_when_its_size_is_compared_then_it_is_that_of_the_model():
    assert remote_link.BLOCK.block_bytes == 16 * 23_040
