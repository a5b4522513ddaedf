# SPDX-License-Identifier: Apache-2.0
"""The tables of the network's page say what the kept runs found, and under which conditions."""

from benchmark import remote_page
from benchmark.metrics import spread

WHERE = {
    "provenance": {"commit": "0123456789abcdef", "date": "2026-11-24T08:00:00+00:00"}
    | {"hardware": {"cpu_model": "A processor", "num_cores": 2}}
}
RUN = {
    **WHERE,
    "remote_ttft_ratio": spread([0.2, 0.1, 0.3]),
    "remote_rate_to_nixl": spread([0.9]),
    "remote_first_layer_share": spread([0.05, 0.07]),
    "remote_token_share": 0.992,
    "outputs_identical": True,
    "num_compared": 12,
    "sizes": {"prompt_tokens": 2000, "num_repeats": 3, "link_pages": 125, "num_link_repeats": 2},
    "config": {"repeats": 3, "link_repeats": 2, "faults": None, "source": False, "seed": 0, "out": "remote"},
}


def test_page_when_a_run_is_kept_then_its_figures_stand_beside_their_aims():
    page = remote_page.page(RUN)
    assert "| `remote_ttft_ratio` | 0.20 (0.10-0.30) | <= 0.35 |" in page
    assert "| `outputs_identical` | true | true |" in page
    words = " ".join(page.split())
    assert (
        "`python -m benchmark.remote --repeats 3 --link-repeats 2 --seed 0`, commit 0123456789, 2026-11-24, A" in words
    )
    assert "12 prompts of 2000 tokens" in words and "of each 99% came from the other node" in words
    assert max(map(len, page.splitlines())) <= 120


def test_faults_page_when_a_kind_took_long_then_its_worst_time_stands_beside_its_aim():
    kinds = {
        "kill": {"num_cut": 20, "extra_s": spread([0.1, 0.4]), "most_extra_s": 1.0},
        "stop": {"num_cut": 19, "extra_s": spread([2.1, 3.4]), "most_extra_s": 3.0},
    }
    run = {**WHERE, **kinds, "outputs_identical": False, "remote_s": 1.2, "compute_s": 1.5, "config": {"faults": 20}}
    page = remote_page.faults_page(run | {"sizes": {"prompt_tokens": 3000, "mb_per_s": 12.0}})
    assert "| killed (SIGKILL) | 20 | 0.25 (0.10-0.40) s | <= 1 s |" in page
    assert "| stopped (SIGSTOP) | 19 | 2.75 (2.10-3.40) s | <= 3 s |" in page
    words = " ".join(page.split())
    assert "--faults 20" in words and "12 MB/s" in words and "Not all answers were those of" in words
