# SPDX-License-Identifier: Apache-2.0
"""The user's eviction policy holds: one rank with Banyan finds of a workload, in a pool too small for it, what the same
rank finds with sharing off."""

import random

import pytest
from test.e2e.conftest import Client
from test.e2e.test_hostile import prompt, serve

from benchmark.servers import wait_ready

pytestmark = pytest.mark.e2e
NUM_REQUESTS = 80
POOL = ("--max-total-tokens", "4000")
POLICIES = {
    "lru": (),
    "lfu": (),
    "slru": (),
    "priority": ("--enable-priority-scheduling",),
    "tlru": ("--radix-eviction-policy-config", '{"threshold": 100, "next_prompt_estimate": 10}'),
}
LEAST_OF_OFF = 0.98


def requests(num_requests):
    """(prompt, priority): few prompts often, many once, each turn behind one of six heads."""
    drawn = random.Random(7)
    heads = [prompt(200 + 40 * number, number) for number in range(6)]
    for _ in range(num_requests):
        often = min(int(drawn.expovariate(0.7)), 5)
        yield heads[often] + prompt(160, 1_000 + drawn.randrange(24)), often


def cached(client, is_by_priority):
    """Tokens that each request found."""
    found = []
    for ids, priority in requests(NUM_REQUESTS):
        wish = {"priority": priority} if is_by_priority else {}
        found.append(client.post("/generate", {**client.body(ids, num_tokens=4), **wish})["meta_info"]["cached_tokens"])
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_pool_when_the_user_has_chosen_what_leaves_it_then_it_finds_as_much_as_with_sharing_off(
    alone, tmp_path, policy
):
    flags = (*POOL, "--radix-eviction-policy", policy, *POLICIES[policy])
    on = serve(tmp_path, "on", *flags, "--banyan-host-gb", "0", dp=1)
    off = serve(tmp_path, "off", *flags, dp=1, share="off")
    with on, off:
        wait_ready([on, off])
        found, as_off = (cached(Client(server), policy == "priority") for server in (on, off))
    assert sum(found) >= LEAST_OF_OFF * sum(as_off) > 0
    if policy != "lru":
        assert found == as_off, "SGLang alone chooses"
