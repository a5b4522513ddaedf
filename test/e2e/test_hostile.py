# SPDX-License-Identifier: Apache-2.0
"""Requests that mean harm, or are unlucky: no server ends, no other prompt's pages are found, and all tokens are those
of a server that shares nothing."""

import random
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
from test.e2e.conftest import Client, until
from test.e2e.what_clients_say import BAD, GOOD, answers, hints

from benchmark.modes import models
from benchmark.modes.run import ENV
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e
NUM_TOKENS = 12
POOL_TOKENS = 40_000
ENGINE = (
    *("--device", "cpu", "--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS), "--context-length", "4096"),
    *("--sleep-on-idle", "--enable-cache-report"),
)


def serve(folder, label, *flags, dp=2, share="on", variables=()):
    env = (*cpu_env(dp=dp), *ENV, *variables)
    return ForkedServer(ServerSpec(label, dp, share, (*ENGINE, *flags), env), models.ensure(models.LLAMA), folder)


def prompt(num_tokens, seed):
    drawn = random.Random(seed)
    return [drawn.randrange(models.FIRST_PLAIN_TOKEN, models.VOCABULARY) for _ in range(num_tokens)]


def status_of(client, body, path="/generate", headers=None):
    try:
        client.post(path, {"sampling_params": {"max_new_tokens": 1, "temperature": 0}, **body}, headers=headers)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def statuses_of(client, rows):
    """By row of the table, what each value got."""
    ids = prompt(40, 2)
    return {
        row: [status_of(client, {"input_ids": ids, **one.body}, headers=one.headers) for one in said]
        for row, said in rows.items()
    }


ENDLESS = {"is_normalized": True, "stop_regex_strs": ["(a+)+$"]}
CALLS = {"tool_call_parser": "pythonic", "tools": [{"type": "function", "function": {"name": "a"}}]}
OWN_TEMPLATE = {"chat_template_kwargs": {"chat_template": "x"}}
ELSEWHERE = (
    ("/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"received_time": "x"}}, 200),
    ("/vertex_generate", {"instances": [{"text": 5}], "parameters": {"input_ids": [[5, 6, 7]]}}, 400),
    ("/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"sampling_params": ENDLESS}}, 400),
    ("/parse_function_call", {**CALLS, "text": "[a(" + "a=," * 60}, 200),
    ("/v1/responses", {"input": "a", **OWN_TEMPLATE}, 400),
    ("/open_session", {"capacity_of_str_len": 1000, "session_id": "s"}, 200),
    ("/generate", {"input_ids": [5, 6, 7], "session_params": {"id": "s"}, "routed_dp_rank": 0}, 200),
    ("/generate", {"input_ids": [5], "session_params": {"id": "s", "replace": True}, "routed_dp_rank": 0}, 400),
    ("/generate", {"input_ids": [5], "rid": "HEALTH_CHECK_1"}, 400),
)
"""What other routes pass on, and turns of a session: what each gets."""


def status_at(client, path, body):
    try:
        client.post(path, body)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


@pytest.mark.parametrize("dp", [1, 2])
def test_server_when_requests_mean_harm_then_it_refuses_or_serves_them_and_its_figures_stay_right(alone, tmp_path, dp):
    with serve(tmp_path, "on", dp=dp) as server:
        wait_ready([server])
        client = Client(server)
        expected, _ = client.generate(prompt(300, 1), num_tokens=NUM_TOKENS)
        # Twice: what the first one leaves behind must not harm the second.
        for said in (BAD, GOOD):
            statuses_of(client, said)
        bad, good = statuses_of(client, BAD), statuses_of(client, GOOD)
        assert [status_at(client, path, body) for path, body, _ in ELSEWHERE] == [status for *_, status in ELSEWHERE]
        assert [client.generate(prompt(300, 1), num_tokens=NUM_TOKENS)[0] for _ in range(4)] == 4 * [expected]
        states = client.ranks().values()
        assert sum(sum(state["hook_failures"].values()) for state in states) == 0
        assert all(0 <= state["dispatch_us"] < 10**9 for state in states)
        assert good == {row: len(said) * [200] for row, said in GOOD.items()}
        assert bad == {row: len(BAD[row]) * [status] for row, status in answers().items()}


def test_request_when_its_name_was_another_prompts_then_it_has_its_own_tokens_and_nobody_else_is_harmed(
    alone, tmp_path
):
    first = prompt(641, 1)
    second = first[:16] + prompt(634, 2)
    with serve(tmp_path, "on") as server:
        wait_ready([server])
        client = Client(server)
        expected, _ = client.generate(second, rank=0, num_tokens=NUM_TOKENS)
        client.post("/flush_cache?timeout=30", {})
        client.generate(first, rank=0, num_tokens=1)
        time.sleep(0.5)
        # It is in no tree, so that nothing is published in between; and its lookup is not used up.
        lasting = {"input_ids": first, "rid": "W", "routed_dp_rank": 1, "bootstrap_host": "2.2.2.2"}
        asked = hints(("banyan.plan", {"action": "compute"}))
        assert status_of(client, {**lasting, "kv_hints": asked}) == 200
        again = client.post(
            "/generate", {**client.body(second, num_tokens=NUM_TOKENS), "rid": "W", "routed_dp_rank": 1}
        )
        details = again["meta_info"]["cached_tokens_details"]
        assert again["output_ids"] == expected
        assert details["peer"] <= 16 and details["dp_max_kv_len"] <= 16
        for rank in (1, 0):
            assert client.generate(second, rank=rank, num_tokens=NUM_TOKENS)[0] == expected


def test_flush_when_a_rank_refuses_it_then_the_answer_says_so_and_its_old_pages_are_not_fetched(alone, tmp_path):
    with serve(tmp_path, "on", "--banyan-plan", "move") as server, ThreadPoolExecutor(1) as pool:
        wait_ready([server])
        client = Client(server)
        for number in range(6):
            asked, busy = prompt(800, 100 + number), number % 2
            expected, _ = client.generate(asked, rank=0, num_tokens=4)
            client.generate(asked, rank=1, num_tokens=4)
            # More tokens than anybody waits for: the rank is busy until it is told to end.
            name = f"busy-{number}"
            body = {**client.body(prompt(50, 5000 + number), num_tokens=4000), "rid": name, "routed_dp_rank": busy}
            running = pool.submit(client.post, "/generate", body)
            time.sleep(1.0)
            until(lambda busy=busy: client.num_tokens_at(busy))
            # The other rank has answered long ago, but has perhaps not come to rest: it would refuse as well.
            client.wait_for_a_step()
            assert status_of(client, {}, "/flush_cache") == 400
            tokens, meta = client.generate(asked, rank=1 - busy, num_tokens=4)
            assert (tokens, meta["cached_tokens"]) == (expected, 0)
            client.post("/abort_request", {"rid": name})
            assert running.result()["meta_info"]["finish_reason"]["type"] == "abort", "it was busy no more"
            assert status_of(client, {}, "/flush_cache?timeout=30") == 200
        assert sum(sum(state["hook_failures"].values()) for state in client.ranks().values()) == 0


CORES = {
    "SGLang's tree in Python": ((), (("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python"),)),
    "sessions in the cache": (("--enable-session-radix-cache",), ()),
    "priorities in the cache": (("--radix-eviction-policy", "priority", "--enable-priority-scheduling"), ()),
}


@pytest.mark.parametrize("core", CORES)
def test_prefix_when_sglangs_tree_is_another_then_it_is_fetched_and_evicted_as_the_user_says(alone, tmp_path, core):
    flags, variables = CORES[core]
    with serve(tmp_path, "on", *flags, "--banyan-plan", "move", variables=variables) as server:
        wait_ready([server])
        client = Client(server)
        asked = [prompt(500, seed) for seed in range(4)]
        expected = [client.generate(ids, rank=0, num_tokens=NUM_TOKENS)[0] for ids in asked]
        again = [client.generate(ids, rank=1, num_tokens=NUM_TOKENS) for ids in asked]
        assert [tokens for tokens, _ in again] == expected
        assert [meta["cached_tokens_details"]["peer"] for _, meta in again] == 4 * [496]


def test_prompt_when_it_has_priority_in_the_cache_then_it_outlives_strangers(alone, tmp_path):
    flags = ("--radix-eviction-policy", "priority", "--enable-priority-scheduling", "--banyan-host-gb", "0")
    with serve(tmp_path, "on", *flags, "--max-total-tokens", "4000") as server:
        wait_ready([server])
        client = Client(server)

        def cached(ids, priority):
            body = {**client.body(ids, num_tokens=4), "routed_dp_rank": 0, "priority": priority}
            return client.post("/generate", body)["meta_info"]["cached_tokens"]

        cached(prompt(1000, 1), 10)
        cached(prompt(1000, 2), 0)
        for number in range(12):
            cached(prompt(600, 100 + number), 0)
        assert (cached(prompt(1000, 1), 10), cached(prompt(1000, 2), 0)) == (992, 0)
        assert "--radix-eviction-policy priority" in server.log_path.read_text()
