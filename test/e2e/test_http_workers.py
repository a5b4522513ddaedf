# SPDX-License-Identifier: Apache-2.0
"""Several HTTP workers: each has what one process has elsewhere. They are started as ever: workers that were forked
would have what was put into SGLang's application before."""

import os
import signal
import urllib.error

import pytest
from test.e2e.conftest import Client, until
from test.e2e.test_hostile import ENGINE, prompt, status_of

from benchmark.modes import models
from benchmark.modes.run import ENV
from benchmark.servers import Server, ServerSpec, cpu_env, wait_ready

pytestmark = [pytest.mark.e2e, pytest.mark.further]


def status_while_it_ends(client):
    try:
        return status_of(client, {"input_ids": prompt(40, 1)})
    except (urllib.error.URLError, ConnectionError):
        # A worker that was asked for nothing yet ends at once, with what it has just been sent.
        return None


def test_server_when_it_has_several_http_workers_then_no_hook_fails_and_once_it_is_to_end_what_is_new_is_refused(
    alone, tmp_path
):
    flags = (*ENGINE, "--tokenizer-worker-num", "2")
    spec = ServerSpec("on", 1, "on", flags, (*cpu_env(dp=1), *ENV))
    with Server(spec, models.ensure(models.LLAMA), tmp_path) as server:
        wait_ready([server])
        client = Client(server)
        for number in range(8):
            client.generate(prompt(40, number))
        assert [state["num_failures"] for state in client.ranks().values()] == [0]
        os.kill(server.pid, signal.SIGTERM)
        until(lambda: status_while_it_ends(client) == 503, timeout_s=20)
