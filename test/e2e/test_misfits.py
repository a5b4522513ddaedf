# SPDX-License-Identifier: Apache-2.0
"""A server on an SGLang that a patch does not fit: without one of the core it serves as stock, without another one it
does without that feature alone."""

import json
import os
from pathlib import Path

import pytest
from test.e2e.conftest import Client
from test.e2e.misfits.sitecustomize import VARIABLE
from test.e2e.test_hostile import ENGINE, prompt

from benchmark.modes import models
from benchmark.modes.run import ENV
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer, Nursery

pytestmark = pytest.mark.e2e
FOLDER = Path(__file__).parent / "misfits"
PYTHON_PATH = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))


class Misfitting(ForkedServer):
    nursery = Nursery({"PYTHONPATH": PYTHON_PATH})


def serve(folder, names, *flags):
    env = (*cpu_env(dp=2), *ENV, ("PYTHONPATH", PYTHON_PATH), (VARIABLE, ",".join(names)))
    return Misfitting(ServerSpec("misfits", 2, "on", (*ENGINE, *flags), env), models.ensure(models.LLAMA), folder)


def lines_of(server, words):
    return [line for line in server.log_path.read_text().splitlines() if words in line]


def test_server_when_patches_of_placement_and_victims_do_not_fit_then_it_serves_and_shares_without_these(
    alone, tmp_path
):
    misfits = ("40-dispatcher", "25-new-nodes", "51-server-info")
    with serve(tmp_path, misfits, "--max-total-tokens", "4000") as server:
        wait_ready([server])
        client = Client(server)
        asked = prompt(400, 1)
        fresh, _ = client.generate(asked, rank=0)
        again, info = client.generate(asked, rank=1)
        assert again == fresh and info["cached_tokens_details"]["peer"] >= 384
        # A full pool, and requests that nobody sends to a rank.
        for seed in range(16):
            client.generate(prompt(700, 100 + seed))
        (placement,) = lines_of(server, "banyan: placement is off")
        (victims,) = lines_of(server, "banyan: victims is off")
        (info_line,) = lines_of(server, "banyan: 51-server-info is off")
        assert "placement/40-dispatcher" in placement and "victims/25-new-nodes" in victims
        assert all("install sglang==" in line for line in (placement, victims, info_line))
        assert all("banyan" not in state for state in json.loads(client.get("/server_info"))["internal_states"])
        assert not lines_of(server, "please report this")


def test_server_when_a_patch_of_the_core_does_not_fit_then_banyan_is_off_and_it_serves(alone, tmp_path):
    with serve(tmp_path, ["23-paged-allocator"]) as server:
        wait_ready([server])
        client = Client(server)
        asked = prompt(400, 1)
        fresh, _ = client.generate(asked, rank=0)
        again, info = client.generate(asked, rank=1)
        assert again == fresh and info["cached_tokens"] == 0
        (line,) = lines_of(server, "banyan: off")
        assert "core/23-paged-allocator" in line
        # Its probes ask there, whatever has become of Banyan.
        client.get("/health_ranks")
        assert all("banyan" not in state for state in json.loads(client.get("/server_info"))["internal_states"])
