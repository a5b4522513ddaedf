# SPDX-License-Identifier: Apache-2.0
"""Prompts with a picture in them, on a model whose vision tower runs: the same picture is found, fetched and stored,
and another one behind the same text is not taken for it."""

from urllib.error import HTTPError

import pytest
from test.e2e.conftest import MOVE, Client, until

from benchmark.modes import asking, pictures
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]
PAGE_TOKENS = 16
FLAGS = ("--device", "cpu", "--max-total-tokens", "1600", "--sleep-on-idle")
ENV = (("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"),)
TEXT, *OTHERS = asking.prompts()


def whole_pages(text):
    """Tokens of a prompt with a picture that may be found."""
    return (len(text) + pictures.NUM_MORE_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS


IN_FRONT = (len(TEXT) // 2) // PAGE_TOKENS * PAGE_TOKENS
"""Tokens of the pages that hold text only, before the picture."""

WHOLE = whole_pages(TEXT)


@pytest.fixture
def servers(alone, tmp_path):
    """One that shares, with an arena and a store that takes pages at their second use, and one that does not."""
    folder = tmp_path / "store"
    folder.mkdir()
    tiers = ("--banyan-host-gb", "0.25", "--banyan-store", str(folder), "--banyan-store-admit", "second")
    # With it SGLang knows what a picture becomes before it sends the request on.
    hashes_early = ("--mm-preprocess-cache-size-mb", "64")
    specs = (
        ServerSpec("pictures", 2, "on", (*FLAGS, *hashes_early, *tiers), (*cpu_env(dp=2), *ENV)),
        ServerSpec("pictures-off", 1, "off", FLAGS, (*cpu_env(dp=1), *ENV)),
    )
    on, off = (ForkedServer(spec, pictures.ensure(), tmp_path) for spec in specs)
    with on, off:
        wait_ready([on, off])
        yield Client(on), Client(off)


def ask(client, seed, rank=None, text=TEXT):
    """``(output ids, cached tokens by where they were)``."""
    asked = pictures.body(text, seed) | {"kv_hints": MOVE}
    told = client.post("/generate", asked if rank is None else asked | {"routed_dp_rank": rank})
    answer = asking.answer_of(told)
    return answer.said, {source: count for source, count in answer.cached.items() if count}


def in_arena(client, seed, rank, text):
    """As ``ask``, until what was computed has been copied down: else it depends on the moment what leaves the pool."""
    before = client.total("backed_up_pages")
    said, cached = ask(client, seed, rank, text)
    num_computed = (whole_pages(text) - sum(cached.values())) // PAGE_TOKENS
    until(lambda: client.total("backed_up_pages") >= before + num_computed)
    return said, cached


def test_picture_when_another_rank_has_it_then_it_is_fetched_and_another_picture_is_not_taken_for_it(servers):
    on, off = servers
    one, other = (ask(off, seed)[0] for seed in (1, 2))
    assert one != other, "the model does not look at the picture"
    # The rank that copies it down first has it in its part of the arena, and it is that one that stores it.
    assert in_arena(on, 1, 0, TEXT) == (one, {})
    assert ask(on, 1, rank=1) == (one, {"peer": WHOLE})
    assert ask(on, 2, rank=1) == (other, {"device": IN_FRONT})
    # Token ids beside a picture go to the rank as they come; a negative one would end it.
    for wrong in (-1, 2**61):
        asked = {"input_ids": [wrong] * 48, "image_data": pictures.picture(1), "sampling_params": asking.GREEDY}
        with pytest.raises(HTTPError, match="400"):
            on.post("/generate", asked)
    # SGLang's processor tells the dispatcher what the picture becomes.
    before = on.total("placed_cache")
    assert ask(on, 1) == (one, {"device": WHOLE})
    assert on.total("placed_cache") == before + 1
    # The second use of its pages at a rank.
    ask(on, 1, rank=0)
    until(lambda: on.total("archived_pages") >= WHOLE // PAGE_TOKENS)
    # When all else has been in the pools since, it has left a rank's own: a peer's or the arena has it.
    for text in OTHERS:
        for rank in (0, 1):
            in_arena(on, 3, rank, text)
    said, cached = ask(on, 1, rank=0)
    assert said == one and cached.keys() <= {"host", "peer"} and sum(cached.values()) == WHOLE, cached
