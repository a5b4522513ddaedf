# SPDX-License-Identifier: Apache-2.0
"""Two prefill servers, a decode server and a router: real engines, one store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from test.e2e.conftest import MODEL

from banyan.cli.engine import Engine
from benchmark.pd import num_answer_pages, num_found_pages
from benchmark.pd_servers import Pair

pytestmark = pytest.mark.e2e

ANSWER_TOKENS = 40


@pytest.fixture(scope="module")
def pairs(alone, tmp_path_factory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("pairs")
    pair = Pair(
        "pairs",
        "on",
        MODEL,
        folder / "logs",
        num_prefills=2,
        store=folder / "store",
        prefill_args=("--max-total-tokens", "9000", "--banyan-plan", "move"),
        decode_args=("--max-total-tokens", "9000"),
    )
    with pair, pair.routed() as url:
        yield SimpleNamespace(pair=pair, url=url, router=Engine(url), store=folder / "store")


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.2)


def first_turn(pairs, ids):
    """A first turn whose answer has been written; the second turn's prompt but for its question."""
    pair = pairs.pair
    before = pair.state(pair.decode)["archived_pages"]
    output = pairs.router.generate(ids, num_tokens=ANSWER_TOKENS)["output_ids"]
    num_pages = num_answer_pages(len(ids), ANSWER_TOKENS)
    until(lambda: pair.state(pair.decode)["archived_pages"] >= before + num_pages)
    for server in [*pair.prefills] * 2:
        # Each answer is a step of its scheduler, in which it takes in what others have announced.
        pair.state(server)
    return [*ids, *output], num_pages


def test_next_turn_when_the_answer_was_generated_on_the_decode_server_then_prefill_finds_all_of_it(pairs, prompt):
    grown, num_pages = first_turn(pairs, prompt("dawn", 120))
    answer = pairs.router.generate([*grown, *prompt("dusk", 30)], num_tokens=4)
    # One more where SGLang had begun the next step before it saw that the answer had ended.
    assert num_found_pages(answer["meta_info"]["cached_tokens_details"]) >= num_pages > 0
    until(lambda: pairs.pair.state(pairs.pair.decode)["num_locked_tokens"] == 0)
