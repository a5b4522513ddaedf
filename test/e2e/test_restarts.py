# SPDX-License-Identifier: Apache-2.0
"""A server whose main process is killed leaves nothing behind, and the next one on the same files is right."""

import pytest

from benchmark.restarts import run

pytestmark = pytest.mark.e2e


def test_server_when_its_main_process_is_killed_under_load_then_nothing_is_left_and_the_next_one_is_right(
    alone, tmp_path
):
    report = run(2, tmp_path)
    assert report["is_right"], report
    assert sum(report["rounds"][1]["cached"].values()) > 0, "what was kept is found"
