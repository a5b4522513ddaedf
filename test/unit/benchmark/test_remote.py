# SPDX-License-Identifier: Apache-2.0
import pytest

from benchmark import remote, remote_link

LINK = [
    {"tcp_s": 0.06, "tcp_transfer_s": 0.05, "tcp_first_layer_s": 0.005, "tcp_cpu_s_per_gb": 1.0}
    | {"by_nixl_s": 0.05, "by_nixl_transfer_s": 0.04, "by_nixl_first_layer_s": 0.002, "by_nixl_cpu_s_per_gb": 0.5}
    | {"bare_s": 0.04, "bare_cpu_s_per_gb": 0.25}
]


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


def test_nixl_when_it_is_compared_then_with_tcp_and_with_itself_bare():
    found = {name: values[0] for name, values in remote_link.nixl_figures(LINK).items()}
    assert found["nixl_rate_to_bare"] == pytest.approx(0.8) and found["nixl_rate_to_tcp"] == pytest.approx(1.2)
    assert found["nixl_first_layer_share"] == pytest.approx(0.05) and found["nixl_cpu_to_tcp"] == 0.5


def test_page_when_its_size_is_compared_then_it_is_that_of_the_model():
    assert remote_link.BLOCK.block_bytes == 16 * 23_040
