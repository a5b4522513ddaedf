# SPDX-License-Identifier: Apache-2.0
"""Whose arena has more of a prompt, from what servers say of themselves and of their pages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from banyan.core import Address
from banyan.router.asked_prompt import Asked
from banyan.router.blocks import ARENA, STORE, block_ids, pack, salt_digests
from banyan.router.description import Description
from banyan.router.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventFeed
from banyan.router.fleet import Server
from banyan.router.health import Health
from banyan.router.metrics import Metrics
from banyan.router.prompt import Request
from banyan.router.sources import source_of
from banyan.routing.hint import SourceHint

PAGE = 16
NUM_BLOCKS = 6
TOKENS = pack(list(range(NUM_BLOCKS * PAGE + 1)))
IDS = list(block_ids(TOKENS, PAGE))
PROMPT = Asked(Request(token_ids=TOKENS), TOKENS)
PAGE_SERVERS = [Address(f"10.0.0.{number}", 7400) for number in (1, 2)]
NOBODY = SourceHint(())


def lender(page_server, *parts):
    """A server of one rank for each part of its arena; it has told everything."""
    made = Server(f"http://{page_server}", Health(3))
    made.description = Description(block_tokens=PAGE, tells_arena=True, lends_at=page_server)
    made.health.came_up()
    made.feeds = [EventFeed() for _ in parts]
    for feed, part in zip(made.feeds, parts, strict=True):
        feed.apply(0, EventBatch(1.0, [BlockStored(part, ARENA)]))
    return made


def borrower(*page_servers):
    made = Server("http://b", Health(3))
    made.description = Description(block_tokens=PAGE, borrows_from=page_servers)
    return made


def source(others, asked=PROMPT, *, page_servers=PAGE_SERVERS, held_tokens=0):
    return source_of(borrower(*page_servers), asked, others, held_tokens=held_tokens)


def test_source_when_two_arenas_have_a_prefix_then_the_longer_one_is_named():
    others = [lender(PAGE_SERVERS[0], IDS[:2]), lender(PAGE_SERVERS[1], IDS[:4])]
    assert source(others) == SourceHint((PAGE_SERVERS[1],))


def test_source_when_both_have_as_much_then_the_less_busy_one_is_named():
    others = [lender(page_server, IDS[:2]) for page_server in PAGE_SERVERS]
    others[0].in_flight[1] = print
    assert source(others) == SourceHint((PAGE_SERVERS[1],))


def test_source_when_an_arena_is_divided_among_ranks_then_it_counts_as_one():
    others = [lender(PAGE_SERVERS[0], IDS[:3]), lender(PAGE_SERVERS[1], IDS[::2], IDS[1::2])]
    assert source(others) == SourceHint((PAGE_SERVERS[1],))


def test_source_when_no_arena_has_more_than_the_server_then_nobody_is_named():
    others = [lender(PAGE_SERVERS[0], IDS[:2]), lender(PAGE_SERVERS[1])]
    others[1].feeds = [EventFeed()]
    others[1].feeds[0].apply(0, EventBatch(1.0, [AllBlocksCleared(), BlockStored(IDS, "GPU")]))
    assert source(others, held_tokens=2 * PAGE) == NOBODY, "pages of pools are not lent"
    assert source(others, held_tokens=PAGE) == SourceHint((PAGE_SERVERS[0],))


def test_source_when_only_a_store_has_a_prefix_then_its_server_is_not_named_for_it():
    others = [lender(PAGE_SERVERS[0], IDS[:2]), lender(PAGE_SERVERS[1])]
    others[1].feeds = [EventFeed()]
    others[1].feeds[0].apply(0, EventBatch(1.0, [BlockStored(IDS, STORE), BlockStored(IDS[:1], ARENA)]))
    assert source(others) == SourceHint((PAGE_SERVERS[0],))
    assert source(others, held_tokens=2 * PAGE) == NOBODY


@pytest.mark.parametrize("lack", ["another page server", "a hole", "down", "does not tell", "other pages"])
def test_source_when_not_all_is_known_then_nothing_is_said_of_nobody_and_what_is_known_is_named(lack):
    known, doubtful = lender(PAGE_SERVERS[0], IDS[:2]), lender(PAGE_SERVERS[1], IDS)
    page_servers = PAGE_SERVERS
    if lack == "another page server":
        page_servers, doubtful = [*PAGE_SERVERS, Address("10.0.0.9", 7400)], lender(PAGE_SERVERS[1], [])
    if lack == "a hole":
        doubtful.feeds[0].apply(5, EventBatch(2.0, []))
    if lack == "down":
        doubtful.health.refused("nobody listens")
    if lack == "does not tell":
        doubtful.description = replace(doubtful.description, tells_arena=False)
    if lack == "other pages":
        doubtful.description = replace(doubtful.description, block_tokens=2 * PAGE)
    assert source([known, doubtful], page_servers=page_servers) == SourceHint((PAGE_SERVERS[0],))
    assert source([known, doubtful], page_servers=page_servers, held_tokens=2 * PAGE) is None


@pytest.mark.parametrize(
    "asked",
    [
        Asked(Request(text=b"x" * 400)),
        Asked(Request(token_ids=TOKENS, namespace="lora"), TOKENS),
        Asked(Request(token_ids=TOKENS, num_others=1), TOKENS),
    ],
)
def test_source_when_its_pages_cannot_be_named_then_nothing_is_said(asked):
    assert source([lender(page_server, IDS) for page_server in PAGE_SERVERS], asked) is None


def test_source_when_a_prompt_is_salted_then_its_own_pages_are_found_and_those_of_others_are_not():
    key_ids = block_ids(TOKENS, PAGE, salt_digests("s")[-1])
    others = [lender(PAGE_SERVERS[0], IDS), lender(PAGE_SERVERS[1], list(key_ids[:2]))]
    salted = Asked(Request(token_ids=TOKENS, cache_salt="s", namespace="s"), TOKENS)
    assert source(others, salted) == SourceHint((PAGE_SERVERS[1],))
    assert source(others, salted, held_tokens=2 * PAGE) == NOBODY


def test_source_when_the_server_asks_nobody_or_has_said_nothing_then_nothing_is_said():
    assert source([lender(PAGE_SERVERS[0], IDS)], page_servers=()) is None
    unknown = Server("http://u", Health(3))
    assert source_of(unknown, PROMPT, [lender(PAGE_SERVERS[0], IDS)], held_tokens=0) is None


def test_source_when_the_server_lends_itself_then_it_is_not_named():
    one = lender(PAGE_SERVERS[0], IDS)
    one.description = replace(one.description, borrows_from=(PAGE_SERVERS[0], PAGE_SERVERS[1]))
    others = [one, lender(PAGE_SERVERS[1], IDS[:1])]
    assert source_of(one, PROMPT, others, held_tokens=0) == SourceHint((PAGE_SERVERS[1],))
    assert source_of(one, PROMPT, others, held_tokens=PAGE) == NOBODY


@pytest.mark.parametrize("seed", range(50))
def test_source_when_pages_come_and_go_then_whoever_is_named_has_more_and_nobody_only_if_nobody_has(seed):
    rng = random.Random(seed)
    others, held = [lender(page_server, []) for page_server in PAGE_SERVERS], [set(), set()]
    for seq in range(1, 40):
        number = rng.randrange(2)
        some = rng.sample(IDS, rng.randrange(1, NUM_BLOCKS))
        event, after = rng.choice(
            [
                (BlockStored(some, ARENA), held[number] | set(some)),
                (BlockRemoved(some, ARENA), held[number] - set(some)),
            ]
        )
        held[number] = after
        feed = others[number].feeds[0]
        feed.apply(feed.next_seq, EventBatch(1.0 + seq, [event, BlockStored(rng.sample(IDS, 3), "GPU")]))
        lengths = [next((at for at, one in enumerate(IDS) if one not in pages), NUM_BLOCKS) for pages in held]
        num_held = rng.randrange(NUM_BLOCKS)
        said = source(others, held_tokens=num_held * PAGE)
        if max(lengths) > num_held:
            (page_server,) = said.page_servers
            assert lengths[PAGE_SERVERS.index(page_server)] == max(lengths)
        else:
            assert said == NOBODY


def info(*states):
    return {"dp_size": len(states), "internal_states": [{"banyan": state} for state in states]}


def test_description_when_a_server_lends_and_borrows_then_its_page_servers_are_known():
    page_server = {"address": "0.0.0.0:7400", "most_read_tokens": 0}
    lends = {"tells_arena": True, "page_server": page_server, "nodes": {"asked": ["[::1]:7400"]}}
    said = Description.read(info(lends), "http://d:30000")
    assert (said.tells_arena, said.lends_at) == (True, Address("d", 7400))
    assert said.borrows_from == (Address("::1", 7400),) and not said.has_others_read
    said = Description.read(info(lends, {"dp_rank": 1}), "http://d:30000")
    assert (said.tells_arena, said.lends_at, said.borrows_from) == (False, Address("d", 7400), ())
    assert Description.read({"dp_size": 1}, "http://d:30000").lends_at is None


@pytest.mark.parametrize(
    ("told", "store"),
    [(["a", "a"], "a"), (["a", "b"], ""), (["a", ""], ""), (["", ""], ""), ([None], ""), ([], "")],
)
def test_description_when_all_ranks_tell_of_one_store_then_it_is_known_by_its_name(told, store):
    states = [{"tells_store": one} if one is not None else {} for one in told]
    assert Description.read(info(*states) | {"dp_size": 2}, "http://d:30000").store == store


def test_sources_when_they_are_counted_then_each_page_server_for_itself():
    metrics, server = Metrics(), Server("http://a:1", Health(1))
    page_servers = [Address("10.0.0.1", 1), Address("10.0.0.2", 1), Address("10.0.0.3", 1)]
    for number in range(1, 8):
        metrics.told(
            server, SourceHint(tuple(page_server for bit, page_server in enumerate(page_servers) if number >> bit & 1))
        )
    metrics.told(server, SourceHint(()))
    told = [line for line in metrics.render([], 0).decode().splitlines() if "sources_total{" in line]
    assert [line.rpartition("source=")[2] for line in told] == [
        '"10.0.0.1:1"} 4.0', '"10.0.0.2:1"} 4.0', '"10.0.0.3:1"} 4.0', '"none"} 1.0'
    ]  # fmt: skip
