# SPDX-License-Identifier: Apache-2.0
"""Drawn bodies and headers against a running server, as `make fuzz` sends them for longer: a status for each, no rank
and no hook fails, and a known prompt keeps its tokens."""

from pathlib import Path

import pytest

from benchmark.http_fuzz import BATCH, Fuzz
from benchmark.servers import wait_ready
from benchmark.soak import rig
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]
NUM_REQUESTS = 600
STRIDE = 29
"""No divisor of the number of values: of each field another few."""

KEPT = Path(__file__).with_name("drawn_requests.txt")


def kept():
    """Numbers of requests that found something once."""
    lines = (line.partition("#")[0].strip() for line in KEPT.read_text().splitlines())
    return [int(line) for line in lines if line]


def test_server_when_requests_are_drawn_then_each_has_a_status_and_nothing_fails(alone, tmp_path):
    numbers = [*kept(), *range(NUM_REQUESTS)]
    with rig.sharing(tmp_path, 2, ForkedServer, rig.store(tmp_path)) as server:
        wait_ready([server])
        fuzz = Fuzz(server)
        # Of fields that the server says it has, each with some of the odd values.
        numbers += fuzz.crossed_numbers[::STRIDE]
        played = [fuzz.play(numbers[at : at + BATCH]) for at in range(0, len(numbers), BATCH)]
    assert [line for one in played for line in one.wrong] == []
    statuses = sum((one.statuses for one in played), start=type(played[0].statuses)())
    assert statuses.total() == len(numbers)
    # Some are valid as they are; others are not.
    assert statuses[200] > 100 and statuses[400] > 100
