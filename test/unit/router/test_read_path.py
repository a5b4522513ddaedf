# SPDX-License-Identifier: Apache-2.0
"""Who reads what of a prompt, from what servers say of themselves."""

from dataclasses import replace

import pytest

from banyan.core import Address
from banyan.router.description import UNKNOWN, Description
from banyan.router.fleet import Server
from banyan.router.health import Health
from banyan.router.read_path import can_read_for, read_path, said_of
from banyan.routing.hint import ReadHint
from banyan.routing.reads import ReadQueue

PAGE_SERVER = "10.0.0.2:7400"
READS = Description(lends_at=Address.parse(PAGE_SERVER), most_read_tokens=10_000)
ASKS = Description(borrows_from=(Address.parse(PAGE_SERVER),), has_others_read=True)
ASKS_ANOTHER = replace(ASKS, borrows_from=(Address("10.0.0.3", 7400),))


def server(description, waits_for_tokens=0):
    made = Server("http://s", Health(3))
    made.description = description
    made.reads = ReadQueue(waits_for_tokens)
    return made


def pair(prefill_waits_for_tokens=0, *, most_tokens=10_000):
    return server(ASKS, prefill_waits_for_tokens), server(replace(READS, most_read_tokens=most_tokens))


def test_path_when_the_beginning_is_cached_then_only_what_lies_behind_it_is_divided():
    path = read_path(*pair(), start=1_000, end=3_000)
    assert (path.num_prefill_tokens, path.num_decode_tokens) == (1_000, 1_000)
    assert path.hint == ReadHint(PAGE_SERVER, 2_000)


def test_path_when_decode_reads_all_then_also_what_was_not_known_to_be_stored():
    path = read_path(*pair(9_000), start=1_000, end=3_000)
    assert path.num_decode_tokens == 2_000 and path.hint == ReadHint(PAGE_SERVER, 0)


def test_path_when_decode_takes_less_for_one_request_then_prefill_reads_the_rest():
    path = read_path(*pair(9_000, most_tokens=900), start=1_000, end=3_000)
    assert (path.num_prefill_tokens, path.num_decode_tokens) == (1_100, 900)
    assert path.hint == ReadHint(PAGE_SERVER, 2_100)


def test_path_when_nothing_was_sent_before_then_nothing_is_said():
    path = read_path(*pair(), start=64, end=0)
    assert (path.num_prefill_tokens, path.num_decode_tokens, path.hint) == (0, 0, None)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (UNKNOWN, READS),
        (ASKS, UNKNOWN),
        (ASKS_ANOTHER, READS),
        (replace(ASKS, has_others_read=False), READS),
        (ASKS, replace(READS, most_read_tokens=0)),
        (Description(), Description()),
        (ASKS, Description()),
    ],
)
def test_path_when_the_servers_do_not_know_each_other_then_prefill_reads_all(prefill, decode):
    path = read_path(server(prefill), server(decode), start=0, end=2_000)
    assert (path.num_prefill_tokens, path.hint) == (2_000, None)


def test_path_when_others_are_under_way_then_they_count_until_they_are_released_once():
    servers = pair(100)
    first = read_path(*servers, start=0, end=2_000)
    assert [one.num_given_tokens for one in servers] == [1_050 - 100, 1_050]
    second = read_path(*servers, start=0, end=2_000)
    assert second.num_decode_tokens < first.num_decode_tokens
    for path in (first, second, first):
        path.release()
    assert [one.num_given_tokens for one in servers] == [0, 0]


def test_pair_when_its_servers_have_said_what_they_are_then_who_reads_for_whom_is_told():
    prefill, decode = pair()
    assert said_of(prefill, decode) == "http://s reads parts of prompts for http://s"
    prefill.description = ASKS_ANOTHER
    assert said_of(prefill, decode).endswith(
        f"its page server is {PAGE_SERVER}, and the other's --banyan-peers are 10.0.0.3:7400"
    )
    prefill.description = Description()
    assert said_of(prefill, decode) is None, "nobody has asked for it"
    prefill.description = UNKNOWN
    assert said_of(prefill, decode) is None


def info(state, **more):
    return {"dp_size": 1, "internal_states": [{"banyan": state}], **more}


@pytest.mark.parametrize(
    ("address", "page_server"),
    [("10.0.0.2:7400", "10.0.0.2:7400"), ("0.0.0.0:7400", "d:7400"), ("[::]:7400", "d:7400")],
)
def test_description_when_a_server_reads_for_others_then_its_page_server_is_named_as_others_name_it(
    address, page_server
):
    state = {"page_server": {"address": address, "most_read_tokens": 640}}
    said = Description.read(info(state), "http://d:30000")
    assert (str(said.lends_at), said.most_read_tokens) == (page_server, 640)


def test_description_when_a_server_can_have_others_read_then_their_page_servers_are_known():
    state = {"waits_for_remote_prefetches": True, "store": {"num_pages": 0}, "nodes": {"asked": [PAGE_SERVER]}}
    others = server(Description.read(info(state), "http://p:30000"))
    assert can_read_for(server(READS), others)
    for lacking in state:
        others.description = Description.read(info({**state, lacking: None}), "http://p:30000")
        assert not can_read_for(server(READS), others)
