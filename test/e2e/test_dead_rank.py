# SPDX-License-Identifier: Apache-2.0
"""A rank's process that is killed takes its server down at once and with a reason, instead of leaving requests without
an answer."""

import os
import signal
import time

import pytest
from test.e2e.conftest import Client
from test.e2e.test_hostile import prompt, serve

from benchmark.servers import wait_ready

pytestmark = pytest.mark.e2e
PATIENCE_S = 30.0


def test_server_when_a_ranks_process_is_killed_then_it_ends_soon_and_says_which(alone, tmp_path):
    with serve(tmp_path, "on") as server:
        wait_ready([server])
        client = Client(server)
        client.generate(prompt(100, 1), rank=1)
        (pid,) = [member["pid"] for member in client.ranks()[0]["peers"]]
        os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + PATIENCE_S
        while server.is_running() and time.monotonic() < until_s:
            time.sleep(0.1)
        assert not server.is_running()
        assert f"scheduler 2 of 2 (pid={pid}) crashed" in server.log_path.read_text()
