# SPDX-License-Identifier: Apache-2.0
"""A rank's process that is killed takes its server down at once and with a reason, instead of leaving requests without
an answer. One that stands still is named."""

import contextlib
import fcntl
import os
import signal
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test.e2e.conftest import Client, until
from test.e2e.test_hostile import prompt, serve

from banyan.cli import top
from banyan.observe.asking import Unanswered
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


def test_server_when_a_rank_stands_still_then_log_probes_and_metrics_say_so_and_it_serves(alone, tmp_path):
    with serve(tmp_path, "on", "--enable-metrics") as server:
        wait_ready([server])
        client = Client(server)
        client.generate(prompt(100, 1), rank=1)
        (pid,) = [member["pid"] for member in client.ranks()[0]["peers"]]
        with ThreadPoolExecutor(1) as pool, open(path_of_loads(pid)) as loads:
            os.kill(pid, signal.SIGSTOP)
            try:
                # As if it had been about to tell its load, which it may have been.
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(loads, fcntl.LOCK_EX | fcntl.LOCK_NB)
                client.generate(prompt(100, 4), rank=0)
                stuck = pool.submit(client.generate, prompt(100, 2), rank=1)
                until(
                    lambda: "rank 1 has requests and has not reported" in server.log_path.read_text(),
                    timeout_s=3 * PATIENCE_S,
                )
                assert health(client, "/health_ranks") == 503
                # No rank has computed since.
                until(lambda: num_silent(client) == 1.0)
                with pytest.raises(Unanswered, match="do not report: 1"):
                    top.look(server.url, None)
                for seed in range(8):
                    client.generate(prompt(60, 10 + seed))
            finally:
                os.kill(pid, signal.SIGCONT)
            assert len(stuck.result(PATIENCE_S)[0]) == 12
        until(lambda: "rank 1 reports again" in server.log_path.read_text(), timeout_s=3 * PATIENCE_S)
        assert health(client, "/health_ranks") == 200


def path_of_loads(pid):
    """Of the file in which all ranks tell their load, under one lock."""
    (path,) = {
        line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "sglang_loads" in line
    }
    return path


def health(client, path):
    """What a probe is told."""
    try:
        client.get(path)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def num_silent(client):
    (line,) = [line for line in client.get("/metrics").splitlines() if line.startswith("banyan:num_silent_ranks")]
    return float(line.split()[-1])
