# SPDX-License-Identifier: Apache-2.0
"""Targets, places and what is expected to be cached, without a socket."""

from __future__ import annotations

import pytest

from banyan.router.asked_prompt import Asked
from banyan.router.blocks import ARENA, STORE, block_ids, pack, salt_digests
from banyan.router.description import Description, Source
from banyan.router.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from banyan.router.fleet import Fleet, Server
from banyan.router.health import Health
from banyan.router.prompt import Request
from banyan.routing import POLICIES, Dispatcher, LoadReport
from banyan.routing.reads import ReadQueue

TOKENS = pack(list(range(65)))
IDS = block_ids(TOKENS, 16)
PROMPT = Asked(Request(token_ids=TOKENS), TOKENS)


def told(num_ranks=1, *, places_itself=False, block_tokens=16, started="1", store=""):
    sources = tuple(Source(rank, "tcp://x", "") for rank in range(num_ranks))
    return Description(num_ranks, places_itself, block_tokens, sources, started, store=store)


def fleet(*descriptions, policy="lmetric", max_in_flight=4):
    servers = [Server(f"http://s{number}", Health(3)) for number in range(len(descriptions))]
    made = Fleet(servers, Dispatcher(0, POLICIES[policy]()), max_in_flight=max_in_flight, clock=lambda: 100.0)
    for server, description in zip(servers, descriptions, strict=True):
        made.described(server, description)
        made.reported(server, {}, ReadQueue())
        server.health.came_up()
    return made


def numbers(server):
    return [target.number for target in server.targets]


def holds(made, server, rank, num_blocks, block_tokens=16):
    ids = block_ids(TOKENS, block_tokens)[:num_blocks]
    made.servers[server].feeds[rank].apply(0, EventBatch(1.0, [BlockStored(ids)]))


def test_cached_when_ranks_are_targets_then_each_its_own():
    made = fleet(told(2), told(1))
    holds(made, 0, 1, 3)
    holds(made, 1, 0, 2)
    assert made.cached_tokens(PROMPT) == [0, 48, 32]
    assert made.take(PROMPT).target.rank == 1


def hears(made, server, *events, rank=0):
    """A rank tells of these."""
    feed = made.servers[server].feeds[rank]
    feed.apply(feed.next_seq or 0, EventBatch(1.0, list(events)))


def test_cached_when_a_server_places_itself_then_what_its_ranks_hold_together():
    made = fleet(told(2, places_itself=True), told(2))
    holds(made, 0, 0, 1)
    hears(made, 0, BlockStored(IDS[1:3], ARENA), rank=1)
    holds(made, 1, 1, 2)
    assert made.cached_tokens(PROMPT) == [48, 0, 32]


def test_place_when_only_a_store_has_the_prompt_then_its_server_until_it_says_that_it_has_gone():
    made = fleet(told(store="a"), told(store="b"))
    hears(made, 1, BlockStored(IDS, "GPU"), BlockStored(IDS, STORE), BlockRemoved(IDS, "GPU"))
    assert made.cached_tokens(PROMPT) == [0, 64]
    place = made.take(PROMPT)
    assert place.target.number == 1
    assert (made.known_tokens(place, PROMPT), made.tokens_in_memory(place, PROMPT)) == (64, 0)
    hears(made, 1, BlockStored(IDS[:1], ARENA), BlockRemoved(IDS[2:], STORE))
    assert made.cached_tokens(PROMPT) == [0, 32] and made.tokens_in_memory(place, PROMPT) == 16


@pytest.mark.parametrize("lost", ["flush", "hole", "restart"])
def test_place_when_what_a_store_has_is_not_known_any_more_then_nobody_is_preferred_for_it(lost):
    made = fleet(told(store="a"), told(store="b"))
    hears(made, 1, BlockStored(IDS, STORE))
    if lost == "flush":
        hears(made, 1, AllBlocksCleared())
    if lost == "hole":
        made.servers[1].feeds[0].apply(7, EventBatch(2.0, []))
    if lost == "restart":
        made.described(made.servers[1], told(started="2", store="b"))
    assert made.cached_tokens(PROMPT) == [0, 0]
    hears(made, 1, BlockStored(IDS, STORE))
    assert made.cached_tokens(PROMPT) == [0, 64], "a rank tells again what lies there"


def test_place_when_servers_have_one_store_together_then_none_of_them_is_preferred_but_to_those_without_it():
    made = fleet(told(store="a"), told(store="a"), told(), policy="lmetric")
    hears(made, 0, BlockStored(IDS[:2], STORE))
    hears(made, 1, BlockStored(IDS[2:], STORE), BlockStored(IDS, "GPU"), BlockRemoved(IDS, "GPU"))
    assert made.cached_tokens(PROMPT) == [64, 64, 0]
    assert [made.take(PROMPT).target.number for _ in range(4)].count(2) == 0


def test_place_when_one_server_has_it_in_its_pool_and_another_in_its_store_then_load_decides():
    made = fleet(told(store="a"), told(store="b"))
    hears(made, 0, BlockStored(IDS, STORE))
    hears(made, 1, BlockStored(IDS, "GPU"))
    for busy in (0, 1):
        for server in (0, 1):
            load = LoadReport(taken_s=busy + 2.0, num_running=3 * (server == busy), ongoing_tokens=900)
            made.told(made.servers[server], 0, load)
        assert made.take(PROMPT).target.number == 1 - busy


def test_cached_when_servers_have_pages_of_different_sizes_then_each_by_its_own():
    made = fleet(told(block_tokens=16), told(block_tokens=32))
    holds(made, 0, 0, 1, 16)
    holds(made, 1, 0, 1, 32)
    assert made.cached_tokens(PROMPT) == [16, 32]


@pytest.mark.parametrize("apart", [{"namespace": "lora"}, {"cache_salt": "s", "namespace": "s"}])
def test_cached_when_a_namespace_keeps_prompts_apart_then_no_page_of_another(apart):
    made = fleet(told())
    holds(made, 0, 0, 4)
    assert made.cached_tokens(Asked(Request(token_ids=TOKENS, **apart), TOKENS)) == [0]


def test_cached_when_a_salted_prompt_is_in_pool_arena_and_store_then_all_of_it_counts():
    """SGLang's events of the pool name its pages otherwise than Banyan's of arena and store."""
    made, salted = fleet(told(), told()), Asked(Request(token_ids=TOKENS, cache_salt="s", namespace="s"), TOKENS)
    pool_ids, key_ids = (block_ids(TOKENS, 16, digest) for digest in salt_digests("s"))
    hears(made, 1, BlockStored(list(pool_ids[:1])), BlockStored(list(key_ids[:2]), ARENA))
    hears(made, 1, BlockStored(list(key_ids[2:]), STORE))
    assert made.cached_tokens(salted) == [0, 64]
    place = made.take(salted)
    assert (place.target.number, made.known_tokens(place, salted), made.tokens_in_memory(place, salted)) == (1, 64, 32)


def test_cached_when_there_are_no_events_then_what_was_sent_and_never_more_than_the_prompt():
    made = fleet(Description(), Description())
    text = Asked(Request(text=b"x" * 2000))
    first = made.take(text).target.number
    assert made.cached_tokens(text)[first] == 448 and made.cached_tokens(text)[1 - first] == 0
    assert made.cached_tokens(Asked(Request(text=b"x" * 300)))[first] == 64


@pytest.mark.parametrize(("keeps_more", "cached"), [(False, 192), (True, 448)])
def test_cached_when_a_stock_rank_has_room_for_less_than_it_was_sent_then_the_rest_is_not_expected_there(
    keeps_more, cached
):
    made = fleet(Description(keeps_more=keeps_more))
    made.told(made.servers[0], 0, LoadReport(taken_s=2.0, capacity_tokens=640))
    first = Asked(Request(text=b"x" * 2000))
    for asked in (first, Asked(Request(text=b"y" * 2000))):
        made.release(made.take(asked))
    assert made.cached_tokens(first) == [cached]


def test_cached_when_no_event_has_come_then_what_was_sent_until_one_has_and_no_page_is_certain():
    made = fleet(told(), told(2, places_itself=True))
    asked = Asked(Request(token_ids=TOKENS), TOKENS)
    place = made.take(asked)
    server = place.target.server
    assert made.cached_tokens(asked)[place.target.number] == 64 and made.known_tokens(place, asked) == 0
    assert [made.tells_nothing(one) for one in made.servers] == [one is server for one in made.servers]
    hears(made, made.servers.index(server))
    assert made.cached_tokens(asked) == [0, 0] and not made.tells_nothing(server)


def test_place_when_a_prompt_is_on_its_way_to_a_target_then_the_next_like_it_follows():
    made = fleet(told(), told(), policy="affinity")
    first = made.take(PROMPT).target
    assert made.take(PROMPT).target is first, "no event has told of it yet"
    salted = Asked(Request(token_ids=TOKENS, cache_salt="s", namespace="s"), TOKENS)
    assert made.take(salted).target is not first, "no prefix draws it, so load does"


def test_place_when_all_are_full_then_none_until_one_is_released_once():
    made = fleet(Description(), max_in_flight=2)
    places = [made.take(PROMPT) for _ in range(2)]
    assert made.take(PROMPT) is None
    made.release(places[0])
    made.release(places[0])
    assert made.take(PROMPT) is not None and made.take(PROMPT) is None


def test_place_when_a_rank_has_not_told_its_load_yet_then_it_is_sent_requests_as_any_other():
    servers = [Server("http://s0", Health(3))]
    made = Fleet(servers, Dispatcher(0, POLICIES["lmetric"]()), max_in_flight=2, clock=lambda: 100.0)
    made.described(servers[0], told(2, block_tokens=0))
    made.reported(servers[0], {0: LoadReport(taken_s=1.0)}, ReadQueue())
    servers[0].health.came_up()
    places = [made.take(PROMPT) for _ in range(5)]
    assert sorted(place.target.rank for place in places[:4]) == [0, 0, 1, 1] and places[4] is None


def test_place_when_a_server_was_tried_then_another_unless_there_is_none():
    made = fleet(Description(), Description(), policy="round_robin")
    assert {made.take(PROMPT, {"http://s0"}).target.number for _ in range(3)} == {1}
    made.servers[1].is_draining = True
    assert made.take(PROMPT, {"http://s0"}).target.number == 0


def test_restart_when_noticed_then_nothing_of_before_is_believed():
    made = fleet(told())
    holds(made, 0, 0, 4)
    assert not made.described(made.servers[0], told())
    assert made.described(made.servers[0], told(started="2"))
    assert made.cached_tokens(PROMPT) == [0] and numbers(made.servers[0]) == [0]


def test_restart_when_the_ranks_are_others_then_those_that_were_there_keep_their_targets():
    made = fleet(told(1), told(1))
    made.described(made.servers[0], told(2, started="2"))
    made.reported(made.servers[0], {}, ReadQueue())
    assert numbers(made.servers[0]) == [0, 2]
    assert sorted(made.active(())) == [0, 1, 2]


def test_restarts_when_a_server_is_another_each_time_then_the_table_grows_no_further_than_the_largest():
    made = fleet(told(1), told(1))
    under_way = made.take(PROMPT, {"http://s1"})
    for number in range(300):
        made.described(made.servers[0], told(1 + number % 4, places_itself=number % 3 == 0, started=f"{number}"))
    # Four ranks of the one, that one as a whole, and the other server.
    assert len(made.targets) == 6
    assert under_way.target.num_in_flight == 1
    made.release(under_way)
    assert under_way.target.num_in_flight == 0
    made.described(made.servers[0], told(1, started="last"))
    made.reported(made.servers[0], {}, ReadQueue())
    assert numbers(made.servers[0]) == [0] and sorted(made.active(())) == [0, 1]


def test_release_when_the_rank_has_not_reported_since_then_the_request_is_on_its_way_no_more():
    made = fleet(Description())
    places = [made.take(PROMPT), made.take(PROMPT)]
    made.release(places[1])
    assert made._dispatcher.states({0})[0].num_requests == 1
    made.release(places[0])
    assert made._dispatcher.states({0})[0].pending_prefill_tokens == 0


def test_told_when_a_stock_rank_was_in_a_forward_then_what_came_meanwhile_counts_until_the_next_has_ended():
    made = fleet(told())
    (server,) = made.servers
    made.told(server, 0, LoadReport(taken_s=99.0, num_running=1, ongoing_tokens=10))
    made.take(PROMPT)
    made.told(server, 0, LoadReport(taken_s=101.0, num_running=1, ongoing_tokens=11))
    assert made._dispatcher.states({0})[0].num_requests == 2, "it was received after that report"
    made.told(server, 0, LoadReport(taken_s=102.0, num_running=2, ongoing_tokens=70))
    assert made._dispatcher.states({0})[0].num_requests == 2


def test_told_when_a_rank_reports_arrivals_then_each_report_counts_what_came_before_it():
    made = fleet(told(places_itself=True))
    (server,) = made.servers
    made.told(server, 0, LoadReport(taken_s=99.0, num_running=1))
    made.take(PROMPT)
    made.told(server, 0, LoadReport(taken_s=101.0, num_running=1, num_waiting=1))
    assert made._dispatcher.states({0})[0].num_requests == 2


def test_told_when_the_same_report_is_asked_for_again_then_it_is_no_later_one():
    made = fleet(told())
    (server,) = made.servers
    made.told(server, 0, LoadReport(taken_s=99.0, stamp_s=7.0, num_running=1))
    made.take(PROMPT)
    for taken_s in (100.1, 100.2, 98.0):
        made.reported(server, {0: LoadReport(taken_s=taken_s, stamp_s=7.0, num_running=1)}, ReadQueue())
    assert made._dispatcher.states({0})[0].num_requests == 2


def test_told_when_the_ranks_of_a_server_are_one_target_then_their_loads_are_added_up():
    made = fleet(told(2, places_itself=True))
    (server,) = made.servers
    made.told(server, 0, LoadReport(taken_s=99.0, num_running=1))
    made.told(server, 1, LoadReport(taken_s=98.0, num_running=2))
    made.told(server, 1, LoadReport(taken_s=99.5, num_running=3))
    assert made._dispatcher.states({0})[0].num_requests == 4


def test_reported_when_the_ranks_of_a_server_are_one_target_then_the_load_of_each_counts():
    made = fleet(told(2, places_itself=True))
    (server,) = made.servers
    for asked_s, loads in ((99.0, (1, 2)), (100.0, (3, 4))):
        # The first rank's is the newer one.
        taken = [LoadReport(taken_s=asked_s - 0.1 * rank, num_running=load) for rank, load in enumerate(loads)]
        made.reported(server, dict(enumerate(taken)), ReadQueue())
        assert made._dispatcher.states({0})[0].num_requests == sum(loads)


def test_reported_when_ranks_wait_for_reads_then_they_count_until_they_are_asked_again_and_published_loads_do_not_say():
    made = fleet(told(2, places_itself=True), told())
    server = made.servers[0]
    dispatcher = made._dispatcher
    made.reported(server, {0: LoadReport(taken_s=99.0, stamp_s=7.0)}, ReadQueue(60_100))
    made.told(server, 0, LoadReport(taken_s=99.5, num_running=1))
    assert [state.read_queue_tokens for state in dispatcher.states({0, 1})] == [60_100, 0]
    dual_path = fleet(told(), told(), policy="dualpath")
    dual_path.reported(dual_path.servers[0], {}, ReadQueue(60_000))
    assert dual_path.take(PROMPT).target.server is dual_path.servers[1]
    made.reported(server, {0: LoadReport(taken_s=99.0, stamp_s=7.0)}, ReadQueue())
    assert [state.read_queue_tokens for state in dispatcher.states({0, 1})] == [0, 0], "the same report, read later"


def test_gave_up_when_a_server_is_silent_then_each_request_there_is_told():
    made = fleet(Description())
    (server,) = made.servers
    said = []
    server.in_flight = {number: lambda *told: said.append(told) for number in range(2)}
    made.gave_up(server, "silent", 5.0)
    assert said == [("silent", 5.0)] * 2
