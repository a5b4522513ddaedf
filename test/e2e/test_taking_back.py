# SPDX-License-Identifier: Apache-2.0
"""A pair whose decode server's pool is small: what has left it comes from its arena, and is not handed over again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from test.e2e.conftest import MODEL, until
from test.e2e.test_pairs import come_to_rest, ids_of, num_requests

from banyan.cli.engine import EngineError
from benchmark.engine import Engine
from benchmark.pd_servers import PAGE_TOKENS, SERVER_ARGS, Pair
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]

POOL_TOKENS = 1600
PROMPT_TOKENS = 700
ANSWER_TOKENS = 24
NUM_ABORTED = 60


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("taking-back")
    pair = Pair(
        "taking-back",
        "on",
        MODEL,
        folder / "logs",
        store=folder / "store",
        prefill_args=("--max-total-tokens", "8000", "--banyan-plan", "move"),
        decode_args=("--max-total-tokens", str(POOL_TOKENS)),
        kind=ForkedServer,
    )
    with pair, pair.routed() as url:
        yield SimpleNamespace(pair=pair, url=url, router=Engine(url))


def push_out(small, prompt, name: str) -> None:
    """Fill the decode server's pool with other prompts, until all that it had before has left it."""
    for number in range(3):
        small.router.generate(prompt(f"{name}-{number}", PROMPT_TOKENS), num_tokens=2)


def test_next_turn_when_the_conversation_has_left_the_decode_pool_then_only_what_is_new_is_handed_over(
    small, prompt, tmp_path
):
    pair, ids = small.pair, prompt("oak", PROMPT_TOKENS)

    def total(server, name):
        return pair.total(server, name)

    first = ids_of(small.router.generate(ids, num_tokens=ANSWER_TOKENS))
    num_known = (len(ids) + ANSWER_TOKENS - 1) // PAGE_TOKENS
    until(lambda: total(pair.decode, "backed_up_pages") >= num_known)
    push_out(small, prompt, "elm")
    grown = [*ids, *first, *prompt("ash", 30)]
    before, before_taken = total(pair.prefills[0], "handed_over_pages"), total(pair.decode, "taken_back_pages")
    second = ids_of(small.router.generate(grown, num_tokens=ANSWER_TOKENS))
    num_pages = -(-len(grown) // PAGE_TOKENS)
    num_taken = total(pair.decode, "taken_back_pages") - before_taken
    assert num_taken == num_known, "all of it had left the pool"
    assert total(pair.prefills[0], "handed_over_pages") - before == num_pages - num_known
    until(lambda: total(pair.decode, "num_locked_tokens") == 0)
    spec = ServerSpec("single", 1, "off", (*SERVER_ARGS, "--max-total-tokens", "4000"), cpu_env(dp=1))
    with ForkedServer(spec, MODEL, tmp_path) as single:
        wait_ready([single])
        alone = Engine(single.url)
        assert [ids_of(alone.generate(asked, num_tokens=ANSWER_TOKENS)) for asked in (ids, grown)] == [first, second]


def test_requests_when_many_are_aborted_on_the_way_then_the_idle_decode_server_holds_nothing(small, prompt):
    """Two conversations that push each other out: each turn takes back; and half of the requests are given up."""
    pair = small.pair
    prompts = [prompt(name, PROMPT_TOKENS) for name in ("pine", "larch", "yew")]
    right = [ids_of(small.router.generate(ids, num_tokens=4)) for ids in prompts]
    before = pair.total(pair.decode, "taken_back_pages")

    def ask(number: int) -> None:
        which = number % len(prompts)
        asked = small.router.generate
        if number % 2:
            try:
                Engine(small.url, timeout_s=0.02 * (1 + number % 9)).generate(prompts[which], num_tokens=200)
            except (EngineError, OSError):
                return
        else:
            assert ids_of(asked(prompts[which], num_tokens=4)) == right[which]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, range(NUM_ABORTED)))
    until(lambda: sum(num_requests(server) for server in pair.servers) == 0)
    until(lambda: pair.total(pair.decode, "num_locked_tokens") == 0)
    assert pair.total(pair.decode, "taken_back_pages") > before
    assert pair.total(pair.decode, "take_backs_failed") == 0
    # SGLang's own check of its pool, when it was idle, has found no hole: the server lives.
    time.sleep(1.0)
    come_to_rest(pair, pair.servers)
    assert ids_of(small.router.generate(prompts[0], num_tokens=4)) == right[0]
