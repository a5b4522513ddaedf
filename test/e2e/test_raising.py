# SPDX-License-Identifier: Apache-2.0
"""Each hook of the patch queue, and each method that SGLang calls, is made to raise on a running server: tokens are
those of a server that shares nothing, a line says what failed, and /server_info counts it."""

import contextlib
import os
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test.e2e.conftest import Client, until
from test.e2e.raising.sitecustomize import VARIABLE
from test.e2e.test_hostile import ENGINE, NUM_TOKENS, prompt, status_of

from banyan import patches
from benchmark.modes import models
from benchmark.modes.run import ENV
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer, Nursery

pytestmark = pytest.mark.e2e
FOLDER = Path(__file__).parent / "raising"
PYTHON_PATH = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))
HOOKED = [patch for patch in patches.load_queue() if patch.kind in ("before", "after", "around")]

AT_START = {
    *("10-add-flags", "11-take-flags", "12-resolve-flags", "13-process-start", "15-adapters", "20-kv-pool"),
    *("23-paged-allocator", "25-evict-leaves", "28-state-pool", "29-draft-pool", "36-kv-classes", "40-dispatcher"),
    *("41-event-loop", "46-cache-path", "46-ending", "46-health-path", "51-stop"),
}
"""Called while a server starts."""

OTHER_MODES = {
    *("14-grpc-requests", "15-image-numbers", "16-image-positions", "28-window-reserve"),
    *("32-state-copied", "32-state-filled", "32-window-filled", "35-awaited-adapters", "36-decode-prefix"),
    *("36-prefill-forwards", "36-refused", "37-decode-completions", "37-decode-match", "37-dp-ranks"),
    *("55-embedding-forward", "56-arena-events"),
}
"""Of models and servers that this one is not."""

REACHED = [patch for patch in HOOKED if patch.name not in AT_START | OTHER_MODES]
METHODS = (
    *("linker.lookup", "linker.num_completed_offloads", "linker.pop_completed_offload"),
    *("BanyanLinker.arrive", "BanyanLinker._poll_tiers", "RankPlanner.became", "RankPlanner.started"),
    *("RankPlanner.moved", "RankPlanner.forward_begins", "RankPlanner.forward_ended"),
    *("layer_wait.set_consumer", "layer_wait.wait_until", "prefill.has_begun"),
    "victims.start",
)
STARTING = ("11-take-flags", "12-resolve-flags", "20-kv-pool", "23-paged-allocator", "40-dispatcher", "41-event-loop")

OF_OTHER_PROCESSES = {patch.name for patch in HOOKED if "scheduler" not in patch.processes}
"""Counted where they fail, and said; /server_info is the ranks'."""

STOPPING = (
    *("linker.load", "linker.start_layer_wise_loading", "linker.finish_layer_wise_loading"),
    *("linker.offload", "linker.reset"),
    *(patch.name for patch in REACHED if patch.on_failure == "stop"),
)


def test_hooks_when_they_are_left_out_of_these_tests_then_each_is_in_the_queue() -> None:
    assert {*AT_START, *OTHER_MODES, *STARTING} <= {patch.name for patch in HOOKED}


class Raising(ForkedServer):
    nursery = Nursery({"PYTHONPATH": PYTHON_PATH})


def serve(folder, raising, *flags):
    env = (*cpu_env(dp=2), *ENV, ("PYTHONPATH", PYTHON_PATH), (VARIABLE, str(raising)))
    spec = ServerSpec("raising", 2, "on", (*ENGINE, "--enable-metrics", "--banyan-plan", "move", *flags), env)
    return Raising(spec, models.ensure(models.LLAMA), folder)


@pytest.fixture
def raising(tmp_path):
    file = tmp_path / "raising"
    file.write_text("")
    return file


def failures(client):
    counts = {}
    for state in client.ranks().values():
        for where, count in state["hook_failures"].items():
            counts[where] = counts.get(where, 0) + count
    return counts


CALLS = {"tool_call_parser": "pythonic", "tools": [{"type": "function", "function": {"name": "a"}}]}
CONTROLS = (
    ("/parse_function_call", {**CALLS, "text": "[a(b=1)]"}),
    ("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1, "regex": "a|b"}}),
    ("/v1/messages", {"model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
    ("/banyan/cache", {"action": "list"}),
    ("/release_memory_occupation", {}),
    ("/resume_memory_occupation", {}),
    ("/abort_request", {"abort_all": True}),
    ("/pause_generation", {"mode": "in_place"}),
    ("/continue_generation", {}),
)
"""Reach hooks, whatever is answered where one of them fails."""


def exercise(client):
    """Everything that a server of text does: prompts from a peer and one's own, a full pool, a weight update, a flush,
    memory that is given back, metrics. The tokens of three prompts."""
    asked = [prompt(400, seed) for seed in range(3)]
    fresh = [client.generate(ids, rank=0, num_tokens=NUM_TOKENS)[0] for ids in asked]
    again = [client.generate(ids, rank=1, num_tokens=NUM_TOKENS)[0] for ids in asked]
    chat = {"model": "any", "prompt": asked[0], "max_tokens": 1, "temperature": 0, "return_cached_tokens_details": True}
    client.post("/v1/completions", chat)
    client.post("/tokenize", {"model": "any", "prompt": "a b"})
    client.get("/v1/loads")
    client.get("/server_info")
    client.get("/metrics")
    for seed in range(5):
        client.generate(prompt(700, 5000 + seed), rank=0, num_tokens=1)
        client.generate(prompt(700, 5500 + seed), rank=1, num_tokens=1)
    later = [client.generate(ids, rank=1, num_tokens=NUM_TOKENS)[0] for ids in asked]
    update = {"model_path": str(models.ensure(models.LLAMA)), "flush_cache": True}
    client.post("/update_weights_from_disk", update)
    client.post("/flush_cache?timeout=30", {})
    session = client.post("/open_session", {"capacity_of_str_len": 1000}).strip('"')
    # What is not waited for comes first.
    for path, body in (("/close_session", {"session_id": session}), *CONTROLS):
        with contextlib.suppress(urllib.error.HTTPError):
            client.post(path, body)
    # Of the last ones nobody hears what becomes of them; what is asked behind them is answered behind them.
    client.get("/server_info")
    assert fresh == again == later
    return fresh


# As often as there are hooks, everything that a server does.
@pytest.mark.timeout(2700)
def test_server_when_a_hook_raises_then_tokens_are_right_and_it_is_counted(alone, tmp_path, raising):
    names = [*(patch.name for patch in REACHED if patch.on_failure == "pass"), *METHODS]
    with serve(tmp_path, raising, "--max-total-tokens", "4000") as server:
        wait_ready([server])
        client = Client(server)
        expected = exercise(client)
        assert failures(client) == {}
        silent = set()
        for name in names:
            raising.write_text(name)
            answers = exercise(client)
            raising.write_text("")
            assert answers == expected, name
            if f"{name} failed" not in server.log_path.read_text():
                silent.add(name)
        assert silent == set(), "these were not reached"
        assert {name for name in names if name not in OF_OTHER_PROCESSES} == failures(client).keys()
        assert client.ranks()[0]["num_failures"] >= len(names)


@pytest.mark.parametrize("name", STOPPING)
def test_server_when_what_keeps_wrong_pages_out_raises_then_it_shares_no_more_and_tokens_are_right(
    name, alone, tmp_path, raising
):
    with serve(tmp_path, raising) as server, ThreadPoolExecutor(1) as pool:
        wait_ready([server])
        client = Client(server)
        expected = exercise(client)
        raising.write_text(name)
        answers = exercise(client)
        # A flush that this rank refuses, however late it comes.
        running = pool.submit(client.generate, prompt(50, 1), rank=0, num_tokens=1200)
        until(lambda: client.num_tokens_at(0) or running.done())
        status_of(client, {}, "/flush_cache")
        running.result()
        raising.write_text("")
        assert answers == expected == exercise(client)
        assert list(failures(client)) == [name]
        assert "shares nothing new from now on" in server.log_path.read_text()


@pytest.mark.parametrize("name", STARTING)
def test_server_when_a_hook_raises_at_its_start_then_it_serves_without_what_the_hook_was_for(
    name, alone, tmp_path, raising
):
    raising.write_text(name)
    with serve(tmp_path, raising) as server:
        wait_ready([server])
        client = Client(server)
        asked = prompt(400, 1)
        fresh = client.post("/generate", {**client.body(asked), "routed_dp_rank": 0})["output_ids"]
        assert client.post("/generate", {**client.body(asked), "routed_dp_rank": 1})["output_ids"] == fresh
        assert f"{name} failed" in server.log_path.read_text()
