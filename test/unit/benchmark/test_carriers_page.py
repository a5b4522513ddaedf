# SPDX-License-Identifier: Apache-2.0
"""The table of carriers says what the kept run found, and under which conditions."""

from benchmark import carriers_page
from benchmark.metrics import spread

WHERE = {
    "provenance": {"commit": "0123456789abcdef", "date": "2026-11-24T08:00:00+00:00"}
    | {"hardware": {"cpu_model": "A processor", "num_cores": 2}}
}


def carrier(*, memory=0.0, disk=0.0, killed=("writer",), page_server_ratio=1.5):
    times = ("carried_s", "compute_s", "carried_cpu_s", "compute_cpu_s", "write_s", "write_cpu_s")
    times += ("lag_s", "carried_stall_s")
    one = {"num_asked": 2, "num_right": 1, "took_s": [0.5, 0.25], "token_shares": [0.98, 0.0]}
    return {
        **dict.fromkeys(times, spread([0.1, 0.2, 0.3])),
        "ttft_ratio": spread([0.05, 0.06]),
        "page_server_ratio": spread([page_server_ratio]),
        "least_token_share": 0.99,
        "memory_bytes_per_page": memory,
        "disk_bytes_per_page": disk,
        "alone": {"0": spread([0.0]), "1.5": spread([0.96])},
        "killed": dict.fromkeys(killed, one),
    }


RUN = {
    **WHERE,
    "carriers": {
        "page_server": carrier(page_server_ratio=1.0),
        "mooncake": carrier(memory=372736.0, killed=("writer", "lender")),
        "mount": carrier(disk=372736.0),
    },
    "outputs_identical": True,
    "num_compared": 50,
    "sizes": {"prompt_tokens": 1600, "short_tokens": 400, "num_repeats": 3, "num_prompts": 4},
}


def test_page_when_a_run_is_kept_then_the_carriers_stand_side_by_side():
    page = carriers_page.page(RUN)
    assert page.startswith("| figure | page server | Mooncake | shared mount |\n|---|---|---|---|\n")
    assert "| carried to computed | 0.055 (0.050-0.060) |" in page
    assert "| the page server's to this one's | - | 1.500 (1.500-1.500) | 1.500 (1.500-1.500) |" in page
    assert "| a page takes, beside the arena's copy | nothing | 364 KiB of memory | 364 KiB of disk |" in page
    assert "200 (100-300) ms" in page and "0 of 1 after 0 s, 1 of 1 after 1.5 s" in page
    words = " ".join(page.split())
    assert "commit 0123456789, 2026-11-24, A processor with 2 cores." in words
    assert "4 prompts of 1600 tokens in each of 3 repeats" in words and "All of 50 answers" in words


def test_page_when_nobody_else_holds_the_bytes_then_that_is_said():
    (line,) = (line for line in carriers_page.page(RUN).splitlines() if "lender, too" in line)
    there_is_none, right = "there is none", "1 of 2 right; 0.50 s, 0.25 s; carried 98%, 0%"
    assert [cell.strip() for cell in line.split("|")[2:5]] == [there_is_none, right, there_is_none]
