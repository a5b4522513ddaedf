# SPDX-License-Identifier: Apache-2.0
"""The dispatcher's lookup and its loop, with SGLang's own messages and hashes; two ranks in one process."""

from array import array
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from sglang.srt.managers.io_struct import FlushCacheReqInput, TokenizedGenerateReqInput, sock_send
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str, storage_namespace_seed
from sglang.srt.sampling.sampling_params import SamplingParams
from test.unit.directory.rig import Rank, frames

from banyan._native import PageKeys, Roster
from banyan.routing import hint
from banyan.sglang_plugin import controller, requests, runtime
from banyan.sglang_plugin.controller import PrefixScout

PAGE = 16


def request(ids, *, rid="r", **extra):
    """A dispatched request; what SGLang requires beside the prompt is left empty."""
    required = {field.name: None for field in msgspec.structs.fields(TokenizedGenerateReqInput) if field.required}
    fields = {**required, "rid": rid, "input_ids": array("q", ids), "sampling_params": SamplingParams(), **extra}
    return TokenizedGenerateReqInput(**fields)


def page_keys(ids, **extra):
    return get_storage_hash_str(RadixKey(array("q", ids), **extra), page_size=PAGE)


@pytest.fixture
def node():
    roster = Roster.create(2)
    return roster, [Rank(roster, slot) for slot in range(2)]


def test_look_up_when_ranks_hold_different_lengths_then_the_longest_is_hinted(node):
    roster, ranks = node
    ids = list(range(100))
    keys = page_keys(ids[:96])
    ranks[0].shelf.publish(frames(1, 2), keys[:2])
    ranks[1].shelf.publish(frames(1, 2, 3), keys[:3])
    req = request(ids)
    PrefixScout(roster, tp_size=1, page_tokens=PAGE).annotate(req)
    (action,) = req.kv_hints.actions
    assert action.payload == {"dp_max_kv_len": 48, "dp_max_kv_rank": 1}


@pytest.mark.parametrize("space", [{"extra_key": "tenant"}, {"cache_salt": "salt"}])
def test_look_up_when_requests_are_in_another_cache_namespace_then_nothing_is_found(node, space):
    roster, ranks = node
    ids = list(range(64))
    ranks[0].shelf.publish(frames(1, 2, 3), page_keys(ids[:48]))
    scout = PrefixScout(roster, tp_size=1, page_tokens=PAGE)
    assert scout.look_up(request(ids)).max_tokens == 48
    assert scout.look_up(request(ids, **space)).max_tokens == 0
    ranks[1].shelf.publish(frames(1, 2, 3), page_keys(ids[:48], **space))
    assert scout.look_up(request(ids, **space)).max_rank == 1


def test_look_up_when_the_whole_prompt_is_cached_then_its_last_token_is_left_to_compute(node):
    roster, ranks = node
    ids = list(range(32))
    ranks[0].shelf.publish(frames(1, 2), page_keys(ids))
    assert PrefixScout(roster, tp_size=1, page_tokens=PAGE).look_up(request(ids)).max_tokens == 16


def test_look_up_when_no_rank_has_come_yet_then_no_hint():
    req = request(range(64))
    PrefixScout(Roster.create(2), tp_size=1, page_tokens=PAGE).annotate(req)
    assert req.kv_hints is None


def test_annotate_when_the_client_sent_hints_then_they_stay(node):
    roster, _ = node
    theirs = KvHintAction(action_id="a", action_type="other", action_version="9")
    req = request(range(64), kv_hints=KvHintsEnvelope(protocol_version="7", message_id="m", actions=[theirs]))
    PrefixScout(roster, tp_size=1, page_tokens=PAGE).annotate(req)
    assert req.kv_hints.protocol_version == "7"
    assert [action.action_type for action in req.kv_hints.actions] == ["other", hint.ACTION_TYPE]


def test_request_when_it_is_created_then_it_carries_the_hint(node, monkeypatch):
    roster, ranks = node
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    ids = list(range(64))
    ranks[1].shelf.publish(frames(1), page_keys(ids[:16]))
    sent = request(ids)
    PrefixScout(roster, tp_size=1, page_tokens=PAGE).annotate(sent)

    class Req:
        rid, kv_hints, full_untruncated_fill_ids = "r", sent.kv_hints, ids

    req = Req()
    requests.after_create_generation_req(req, None, sent)
    assert (req.dp_origin_kv_len, req.dp_max_kv_len, req.dp_max_kv_rank) == (0, 16, 1)
    assert requests.num_prompt_pages("r", PAGE) == 3
    del req
    assert requests.num_prompt_pages("r", PAGE) is None


class StopLoop(Exception):
    pass


def test_event_loop_when_messages_come_then_all_are_dispatched_in_order(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: object())
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.bind("inproc://loop")
    sender.connect("inproc://loop")
    for number in range(3):
        sock_send(sender, FlushCacheReqInput(timeout_s=number))
    seen = []

    def dispatch(message):
        seen.append(message.timeout_s)
        if len(seen) == 3:
            raise StopLoop

    watchdog = SimpleNamespace(feed=lambda: None)
    fake = SimpleNamespace(recv_from_tokenizer=receiver, soft_watchdog=watchdog, _request_dispatcher=dispatch)
    with pytest.raises(StopLoop):
        controller.around_event_loop(None, fake)
    assert seen == [0, 1, 2]
    context.destroy(linger=0)


def test_event_loop_when_banyan_is_off_then_upstreams_runs(monkeypatch):
    monkeypatch.setattr(runtime, "config", lambda: None)
    ran = []
    controller.around_event_loop(ran.append, "controller")
    assert ran == ["controller"]


@pytest.mark.parametrize(
    "space", [{}, {"extra_key": "tenant"}, {"cache_salt": "salt"}, {"extra_key": "", "cache_salt": "ß"}]
)
def test_page_keys_when_hashed_natively_then_they_are_upstreams(space):
    ids = array("q", [*range(40 * PAGE), 2**32 - 1])
    seed = storage_namespace_seed(space.get("extra_key"), space.get("cache_salt"))
    found = PageKeys(PAGE, 4).of(bytes.fromhex(seed) if seed else None, ids)
    assert found == page_keys(ids[: 40 * PAGE], **space)
