# SPDX-License-Identifier: Apache-2.0
"""Whatever clients and servers send: the router reads it or says that it cannot, and nothing else is raised.

Longer: `pytest test/unit/router/test_fuzz.py --hypothesis-profile=long`.
"""

from __future__ import annotations

import contextlib
import json
from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.router import prompt
from banyan.router.blocks import BITS, STORE, RankBlocks
from banyan.router.call import target_of
from banyan.router.events import BlockRemoved, BlockStored, EventFeed, read_batch, read_number
from banyan.router.load_feed import read_load
from banyan.router.paths import BY_PATH
from banyan.router.upstream import at
from banyan.router.verdict import TooLong
from benchmark.byte_readers import read_body, read_description, read_stream, read_text

NAMES = (
    *("text", "input_ids", "prompt", "messages", "role", "content", "type", "tools", "stream", "image_data"),
    *("input_embeds", "cache_salt", "extra_key", "lora_path", "session_id", "session_params", "id", "image_url"),
    *("input", "system", "instructions", "metadata", "conversation"),
    *prompt.RANK_FIELDS,
)
SAID = (
    *(
        "dp_size",
        "internal_states",
        "kv_events",
        "banyan",
        "page_server",
        "address",
        "most_read_tokens",
        "nodes",
        "asked",
    ),
    *("publisher", "endpoint_host", "endpoint_port_base", "replay_endpoint_port_base", "block_size", "topic", "store"),
    *(
        "disaggregation_mode",
        "disaggregation_bootstrap_port",
        "startup_time",
        "tells_store",
        "waits_for_remote_prefetches",
    ),
    *("timestamp", "loads", "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_total_tokens", "load_topic"),
    *("max_total_num_tokens", "num_used_tokens", "num_waiting_uncached_tokens", "read_tokens_per_s"),
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([2**31, 2**32, 2**63, 2**64, -1, 10**400])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text() | st.sampled_from(["zmq", "text", "\ud800", "prefill", "a:1"])


def objects(names):
    """JSON whose fields have names that somebody reads."""
    return st.recursive(
        LEAVES,
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(names) | st.text(), inner),
        max_leaves=20,
    )


def cut_and_changed(whole: bytes, at: int, piece: bytes) -> bytes:
    at %= len(whole) + 1
    return whole[:at] + piece + whole[at + len(piece) :]


BODIES = st.binary() | st.builds(
    cut_and_changed, objects(NAMES).map(lambda value: json.dumps(value).encode()), st.integers(0), st.binary(max_size=4)
)


@given(st.sampled_from(sorted(BY_PATH)), BODIES, st.dictionaries(st.sampled_from(prompt.RANK_HEADERS), st.text()))
def test_body_when_it_is_anything_then_it_is_placed_and_passed_on(path, body, headers):
    read_body(path, body, headers)


@given(st.sampled_from(sorted(BY_PATH)), st.dictionaries(st.sampled_from(NAMES), objects(NAMES)))
def test_fields_when_they_hold_anything_then_they_are_placed(path, fields):
    read_body(path, json.dumps(fields).encode(), {})


@given(st.text() | st.from_regex(r"[a-z.:\[\] ,0-9]{0,40}"))
def test_header_when_it_is_anything_then_it_is_read_or_not_ours(value):
    read_text(value)


@given(st.dictionaries(st.sampled_from(SAID), objects(SAID)))
def test_description_when_a_server_says_anything_then_it_is_read_or_refused(said):
    read_description(json.loads(json.dumps(said)))


@given(st.binary() | objects(SAID).map(lambda value: json.dumps(value).encode()))
def test_event_or_load_when_it_is_anything_then_it_is_read_or_refused(payload):
    for read in (read_batch, lambda payload: read_load(payload, 0.0)):
        with contextlib.suppress(msgspec.DecodeError):
            read(payload)


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.sampled_from([BlockStored, BlockRemoved]),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
        st.sampled_from([*BITS, None]) | st.text(max_size=5),
    )
)


@given(EVENTS)
def test_feed_when_a_rank_tells_anything_then_it_keeps_no_more_than_it_may(events):
    feed = EventFeed(RankBlocks(most_stored=8, most_blocks=16))
    for ts, (seq, kind, ids, medium) in enumerate(events):
        batch = read_batch(msgspec.msgpack.encode([float(ts), [kind(ids, medium)]]))
        feed.first_missing(seq, batch)
        feed.apply(seq, batch)
    assert len(feed.blocks) <= 16 and feed.blocks.num_in(STORE) <= 8 and feed.blocks._nums.keys() <= BITS.keys()


LINE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E)) | st.text(st.sampled_from("/.#?%;\\@:25fF"))


@given(LINE | LINE.map(lambda rest: f"/{rest}"))
def test_target_when_it_is_anything_then_a_server_reads_the_path_in_it_that_the_router_does(line):
    path, _, query = line.partition("?")
    target = target_of({"raw_path": path.encode(), "query_string": query.encode()})
    if not path.startswith("/"):
        with pytest.raises(ValueError):
            at("http://a:1", target)
        return
    url = at("http://a:1", target)
    sent, _, with_query = url.raw_path_qs.partition("?")
    assert (url.host, url.port) == ("a", 1)
    assert unquote(sent) == unquote(path) and unquote(with_query) == unquote(query)


@given(st.binary(max_size=12))
def test_number_of_a_batch_when_it_is_anything_then_it_is_one_of_eight_bytes_or_refused(number):
    if len(number) == 8:
        assert -(2**63) <= read_number(number) < 2**63
    else:
        with pytest.raises(ValueError):
            read_number(number)


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"\n", b"\r\n", b"data: x\n\n"])))
def test_stream_when_it_is_cut_anywhere_then_all_is_passed_on_or_it_is_too_long(chunks):
    try:
        read_stream(chunks, max_bytes=100)
    except TooLong:
        assert sum(map(len, chunks)) > 100
