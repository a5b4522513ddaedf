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


def test_page_when_a_kept_figure_was_computed_afterwards_then_it_says_so():
    noted = RUN | {"provenance": RUN["provenance"] | {"note": "a rate is of later."}}
    assert "Not as that command wrote it: a rate is of later." in " ".join(remote_page.page(noted).split())
    assert "Not as that" not in remote_page.page(RUN)


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


def test_nixl_page_when_a_run_is_kept_then_both_paths_stand_beside_each_other():
    figures = {name: spread([0.5, 0.7]) for name in remote_page.NIXL_ROWS}
    page = remote_page.nixl_page(
        {
            **WHERE,
            "over_tcp": figures,
            "through_memory": figures | {"nixl_cpu_to_tcp": spread([0.25])},
            "num_drawn_faults": 10_000,
            "num_wrong": 0,
            "sizes": {"link_pages": 125, "num_link_repeats": 2},
            "config": {"repeats": 3, "link_repeats": 2, "nixl": True, "inside": False, "seed": 0, "out": "remote"},
        }
    )
    assert "| by NIXL to TCP (aim: <= 0.5) | 0.60 (0.50-0.70) | 0.25 (0.25-0.25) |" in page
    words = " ".join(page.split())
    assert "`python -m benchmark.remote --repeats 3 --link-repeats 2 --nixl --seed 0`" in words
    assert "Of 10000 pulls with drawn faults 0 took a wrong byte" in words
    assert max(map(len, page.splitlines())) <= 120


def test_faults_page_when_nixl_carried_then_its_command_says_so():
    kinds = {how: {"num_cut": 2, "extra_s": spread([0.1]), "most_extra_s": 1.0} for how in remote_page.FAULT_WORDS}
    run = {**WHERE, **kinds, "outputs_identical": True, "compute_s": 1.0, "remote_s": 0.5}
    run |= {"sizes": {"prompt_tokens": 3000, "mb_per_s": 12.0}, "config": {"faults": 2, "nixl": True}}
    assert "`python -m benchmark.remote --faults 2 --nixl`" in " ".join(remote_page.faults_page(run).split())
