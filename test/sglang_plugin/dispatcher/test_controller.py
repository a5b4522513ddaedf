# SPDX-License-Identifier: Apache-2.0
"""The dispatcher's placement and its loop, with SGLang's own messages and hashes; two ranks in one process."""

import math
import time
from array import array
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import zmq
from sglang.srt.managers.io_struct import FlushCacheReqInput, SessionParams, msgpack_decode, msgpack_encode, sock_send
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.mem_cache.utils import storage_namespace_seed
from test.sglang_plugin.dispatcher.dispatch_rig import PAGE, page_keys, placer_of, probe_of, request
from test.sglang_plugin.image_prompts import image_prompt
from test.sglang_plugin.rank.matched import Matched
from test.unit.directory.rig import Rank, frames

from banyan import faults
from banyan._native import PageKeys, RankTable
from banyan.config import Config
from banyan.layout import Layout
from banyan.routing import POLICIES, Dispatcher, Reason, Wait, hint
from banyan.routing.policies import DualPath, LMetric
from banyan.routing.sent import MOST_PIECES, PIECE_TOKENS
from banyan.sglang_plugin import kv_hints, runtime
from banyan.sglang_plugin.dispatcher import controller
from banyan.sglang_plugin.dispatcher.held_back import MAX_HELD
from banyan.sglang_plugin.dispatcher.placement import Placer
from banyan.sglang_plugin.dispatcher.prefix_probe import (
    LEAST_REMEMBERED_CHUNKS,
    MOST_REMEMBERED_CHUNKS,
    Found,
    num_remembered_chunks,
    unused_by_rank,
)
from banyan.sglang_plugin.dispatcher.rank_watchdog import SILENCE_S
from banyan.sglang_plugin.kv_hints import session_of
from banyan.sglang_plugin.rank import hooks, linker, requests
from banyan.sglang_plugin.rank.reporting import load_report
from banyan.telemetry import Counters

PLACE = range(32, 72)
LAYOUT = Layout(dp=2, attn_dp=1, attn_cp=1, attn_tp=1)


@pytest.fixture
def node():
    rank_table = RankTable.create(2)
    return rank_table, [Rank(rank_table, slot) for slot in range(2)]


def test_probe_when_ranks_hold_different_lengths_then_each_is_told(node):
    rank_table, ranks = node
    keys = page_keys(list(range(96)))
    ranks[0].frame_table.publish(frames(1, 2), keys[:2])
    ranks[1].frame_table.publish(frames(1, 2, 3), keys[:3])
    assert probe_of(rank_table).look_up(request(range(100))) == Found((32, 48), 48)


def test_probe_when_sglang_chose_other_pages_than_the_flags_then_prompts_are_hashed_in_those_of_the_ranks(node):
    rank_table, ranks = node
    ranks[0].frame_table.publish(frames(1, 2), page_keys(list(range(128)), page_tokens=64))
    assert probe_of(rank_table, page_tokens=64).look_up(request(range(150))) == Found((128, 0), 128)


def test_probe_when_ranks_do_not_fetch_then_only_an_arena_can_give(node):
    rank_table, ranks = node
    keys = page_keys(list(range(96)))
    ranks[0].frame_table.publish(frames(1, 2, 3), keys[:3])
    assert probe_of(rank_table, fetches=False).look_up(request(range(100))) == Found((48, 0), 0)
    ranks[1].frame_table.publish(frames(1, 2), keys[:2])
    assert probe_of(rank_table, num_ranks=1, fetches=False).look_up(request(range(100))) == Found((48,), 32)


def test_probe_when_ranks_are_on_another_node_then_they_are_taken_to_hold_what_was_sent_there(node):
    rank_table, ranks = node
    layout = Layout(dp=1, attn_dp=4, attn_cp=1, attn_tp=1, num_nodes=2, node=0)
    probe, ids = probe_of(rank_table, layout=layout), list(range(1000, 1300))
    ranks[1].frame_table.publish(frames(1, 2), page_keys(ids[:32]))
    found = probe.look_up(request(ids))
    assert found == Found((0, 32, 0, 0), 32)
    for rank in (0, 3):
        probe.sent(rank, found)
    assert probe.look_up(request([*ids, 1, 2])) == Found((0, 32, 0, 256), 32), "four whole pieces of 64 tokens"
    assert probe.look_up(request(ids, cache_salt="other")).tokens_by_rank == (0, 0, 0, 0)
    probe.has_room_for(3, 64)
    probe.sent(3, probe.look_up(request(range(2000, 2100))))
    assert probe.look_up(request(ids)).tokens_by_rank == (0, 32, 0, 0), "its pool has no room for both"


def test_probe_when_weights_were_updated_then_the_ranks_are_found_under_their_new_namespace(node):
    rank_table, ranks = node
    ids = list(range(64))
    probe = probe_of(rank_table)
    ranks[0].frame_table.publish(frames(1, 2, 3), page_keys(ids[:48]))
    assert probe.look_up(request(ids)).tokens_by_rank == (48, 0)
    for rank in ranks:
        rank.frame_table.close()
        del rank.peers
    updated = [Rank(rank_table, slot, namespace=b"u" * 32) for slot in range(2)]
    assert probe.look_up(request(ids)).tokens_by_rank == (0, 0)
    updated[1].frame_table.publish(frames(1, 2, 3), page_keys(ids[:48]))
    assert probe.look_up(request(ids)).tokens_by_rank == (0, 48)


@pytest.mark.parametrize("num_tokens, expected", [(33, 16), (34, 32), (48, 32), (49, 32), (50, 48), (200, 192)])
def test_probe_when_keys_are_of_bigrams_then_a_page_counts_with_the_token_behind_it(node, num_tokens, expected):
    rank_table, ranks = node
    ids = list(range(num_tokens))
    # What SGLang's tree has of the prompt and its first token of an answer.
    keys = page_keys([*ids, 7], is_bigram=True)
    ranks[1].frame_table.publish(frames(*range(1, len(keys) + 1)), keys)
    probe = probe_of(rank_table, tokens_ahead=1)
    assert probe.look_up(request(ids)) == Found((0, expected), expected)
    assert probe.most_cached_tokens(request(ids)) == expected
    assert probe_of(rank_table).look_up(request(ids)) == Found((0, 0), 0), "keys of tokens are other keys"
    others = [*ids[:16], 9999, *ids[17:]]
    assert probe.look_up(request(others)).tokens_by_rank == (0, 0), "the token behind the first page is another"


def test_probe_when_one_rank_stands_apart_then_what_the_others_hold_is_found():
    rank_table = RankTable.create(3)
    ranks = [Rank(rank_table, slot, namespace=name * 32) for slot, name in enumerate((b"x", b"n", b"n"))]
    ranks[1].frame_table.publish(frames(1, 2), page_keys(list(range(96)))[:2])
    assert probe_of(rank_table, num_ranks=3).look_up(request(range(100))) == Found((0, 32, 0), 32)


@pytest.mark.parametrize("space", [{"extra_key": "tenant"}, {"cache_salt": "salt"}])
def test_probe_when_requests_are_in_another_cache_namespace_then_nothing_is_found(node, space):
    rank_table, ranks = node
    ids = list(range(64))
    ranks[0].frame_table.publish(frames(1, 2, 3), page_keys(ids[:48]))
    probe = probe_of(rank_table)
    assert probe.look_up(request(ids)).tokens_by_rank == (48, 0)
    assert probe.look_up(request(ids, **space)).tokens_by_rank == (0, 0)
    ranks[1].frame_table.publish(frames(1, 2, 3), page_keys(ids[:48], **space))
    assert probe.look_up(request(ids, **space)).tokens_by_rank == (0, 48)


def test_probe_when_the_whole_prompt_is_cached_then_its_last_token_is_left_to_compute(node):
    rank_table, ranks = node
    ids = list(range(32))
    ranks[0].frame_table.publish(frames(1, 2), page_keys(ids))
    assert probe_of(rank_table).look_up(request(ids)).tokens_by_rank == (16, 0)


@pytest.mark.parametrize(
    "content",
    [
        {"input_embeds": [[0.5]]},
        {"mm_inputs": object()},
        {"need_wait_for_mm_inputs": True},
        {"positional_embed_overrides": object()},
    ],
)
def test_probe_when_tokens_are_not_all_of_the_prompt_then_it_does_not_look(node, content):
    rank_table, ranks = node
    ids = list(range(32))
    ranks[0].frame_table.publish(frames(1, 2), page_keys(ids))
    assert probe_of(rank_table).look_up(request(ids, **content)) == Found()


@pytest.mark.parametrize("ahead", [0, 1])
def test_probe_when_the_processor_says_what_the_image_becomes_then_the_same_image_is_found_and_no_other(node, ahead):
    rank_table, ranks = node
    ids, sent = image_prompt(1 << 63, num_tokens=120, image=PLACE)
    keys = page_keys([*sent.padded_input_ids, 5], is_bigram=bool(ahead))
    ranks[1].frame_table.publish(frames(*range(1, len(keys) + 1)), keys)
    probe = probe_of(rank_table, tokens_ahead=ahead)
    whole = (len(ids) - 1 - ahead) // PAGE * PAGE
    # As it comes to the dispatcher, in SGLang's own encoding.
    required = {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "stream": False}
    came = msgpack_decode(msgpack_encode(request(ids, mm_inputs=sent, **required)))
    assert probe.look_up(came).tokens_by_rank == (0, whole)
    # The text in front of it. Of bigrams the last of its pages depends on the image.
    in_front = PLACE[0] // PAGE * PAGE - ahead * PAGE
    other = request(ids, mm_inputs=image_prompt(1 << 62, num_tokens=120, image=PLACE)[1])
    assert probe.look_up(other).tokens_by_rank == (0, in_front)
    assert probe.look_up(request(ids)).tokens_by_rank == (0, in_front), "the tokens of the text alone"


@pytest.mark.parametrize("padded", [None, []])
def test_probe_when_only_the_rank_will_know_what_the_image_becomes_then_it_does_not_look(node, padded):
    rank_table, ranks = node
    ids, sent = image_prompt(1, num_tokens=120, image=PLACE)
    ranks[0].frame_table.publish(frames(1, 2), page_keys(ids[:32]))
    sent.padded_input_ids = padded
    assert probe_of(rank_table).look_up(request(ids, mm_inputs=sent)) == Found()


@pytest.mark.parametrize("num_frames", [0, 20_000, 1_000_000, 4_000_000, 100_000_000])
def test_remembered_when_ranks_hold_many_pages_then_twice_as_many_have_room_up_to_a_bound(num_frames):
    chunks = num_remembered_chunks(num_frames)
    assert chunks.bit_count() == 1, "the native memory takes powers of two"
    assert LEAST_REMEMBERED_CHUNKS <= chunks <= MOST_REMEMBERED_CHUNKS
    assert chunks * PageKeys.CHUNK_PAGES >= 2 * num_frames or chunks == MOST_REMEMBERED_CHUNKS


def member(slot, num_published, *, num_frames=100, alive=True):
    return {"slot": slot, "alive": alive, "num_frames": num_frames, "num_published": num_published}


TWO_RANKS = Layout.of_flags(tp_size=1, dp_size=2)


def test_unused_when_ranks_say_what_they_hold_then_the_rest_is_room():
    members = [member(0, 100), member(1, 40), member(2, 0, alive=False)]
    assert unused_by_rank(members, TWO_RANKS, 16) == {0: 0, 1: 960}


def test_unused_when_the_arena_has_room_then_nothing_that_leaves_a_pool_is_lost():
    full = [member(0, 100), member(1, 100), member(2, 100)]
    assert unused_by_rank([*full, member(3, 90)], TWO_RANKS, 16) == {}
    for num_published in (100, 97):
        assert unused_by_rank([*full, member(3, num_published)], TWO_RANKS, 16) == {0: 0, 1: 0}, "it is being filled"


def test_unused_when_ranks_have_window_pages_too_then_those_do_not_count():
    full = [member(0, 100), member(1, 40), member(2, 100), member(3, 100)]
    assert unused_by_rank([*full, member(4, 1), member(6, 1)], TWO_RANKS, 16) == {0: 0, 1: 960}


def test_unused_when_requests_run_then_what_they_hold_and_nobody_finds_is_no_room(node):
    rank_table, _ = node
    used = [LoadSnapshot(timestamp=time.time(), dp_rank=rank, max_total_num_tokens=1_000) for rank in range(2)]
    used[1].num_used_tokens = 700
    dispatcher = Dispatcher(2, LMetric())
    placer = placer_of(rank_table, dispatcher=dispatcher, snapshots=used)
    for held, expected in (({0: 960, 1: 960}, [960, 300]), ({0: 0, 1: 160}, [0, 160]), ({}, [None, None])):
        placer._probe.unused_tokens = lambda now_s, held=held: held
        placer.read_loads()
        assert [state.unused_tokens for state in dispatcher.states([0, 1])] == expected
        for snapshot in used:
            snapshot.timestamp += 1


def test_place_when_a_rank_holds_the_prefix_then_it_is_named_with_the_reason(node):
    rank_table, ranks = node
    ranks[1].frame_table.publish(frames(1, 2, 3), page_keys(list(range(48))))
    req = request(range(64))
    placer_of(rank_table, dispatcher=Dispatcher(2, LMetric())).place(req, [0, 1])
    payload = req.kv_hints.actions[-1].payload
    assert req.routed_dp_rank == 1
    assert (payload["policy"], payload["reason"], payload["num_hot_ranks"]) == ("lmetric", "cache", 0)
    assert payload["dispatch_us"] >= 0


def test_place_when_the_holder_is_not_active_then_another_is_named(node):
    rank_table, ranks = node
    ranks[1].frame_table.publish(frames(1, 2, 3), page_keys(list(range(48))))
    req = request(range(64))
    placer_of(rank_table, dispatcher=Dispatcher(2, LMetric())).place(req, [0])
    assert req.routed_dp_rank == 0


def test_place_when_the_holder_is_loaded_then_the_snapshot_counts(node):
    rank_table, ranks = node
    ranks[1].frame_table.publish(frames(1), page_keys(list(range(16))))
    busy = LoadSnapshot(timestamp=time.time(), dp_rank=1, num_waiting_reqs=3, num_waiting_uncached_tokens=900)
    req = request(range(64))
    placer_of(rank_table, dispatcher=Dispatcher(2, LMetric()), snapshots=[busy]).place(req, [0, 1])
    assert req.routed_dp_rank == 0


@pytest.mark.parametrize(("rank", "set_s", "ahead_s"), [(1, 0, -40), (1, 0, 40), (0, -40, -40)])
def test_rank_when_its_node_shows_another_time_or_the_clock_is_set_back_then_what_it_reports_is_heard(
    node, monkeypatch, rank, set_s, ahead_s
):
    now = time.time
    snapshots = [LoadSnapshot(timestamp=now(), dp_rank=rank)]
    two_nodes = Layout(dp=1, attn_dp=2, attn_cp=1, attn_tp=1, num_nodes=2)
    placer = placer_of(node[0], dispatcher=Dispatcher(2, LMetric()), snapshots=snapshots, layout=two_nodes)
    placer.unheard_s(time.monotonic(), [0, 1])
    placer.place(request(range(64), routed_dp_rank=rank), [0, 1])
    assert placer.unheard_s(time.monotonic() + SILENCE_S, [0, 1])[rank] >= SILENCE_S, "nothing new"
    monkeypatch.setattr(time, "time", lambda: now() + set_s)
    snapshots[0] = LoadSnapshot(timestamp=now() + ahead_s, dp_rank=rank)
    assert placer.unheard_s(time.monotonic() + SILENCE_S, [0, 1]) == {}
    placer.place(request(range(64), routed_dp_rank=rank), [0, 1])
    assert placer.unheard_s(time.monotonic() + SILENCE_S, [0, 1])[rank] >= SILENCE_S


def test_place_when_a_rank_waits_for_many_reads_then_dualpath_names_another(node):
    rank_table, _ = node
    dispatcher = Dispatcher(2, DualPath(alpha_tokens=4 * PAGE))
    placer = placer_of(rank_table, dispatcher=dispatcher)
    for busy, free in ((0, 1), (1, 0)):
        rank_table.set_reading(busy, 5)
        rank_table.set_reading(free, 4)
        req = request(range(64))
        placer.place(req, [0, 1])
        assert req.routed_dp_rank == free
        assert dispatcher.states([0, 1])[busy].read_queue_tokens == 5 * PAGE


def test_place_when_the_client_pinned_a_rank_then_it_stays_and_counts(node):
    rank_table, _ = node
    dispatcher = Dispatcher(2, LMetric())
    req = request(range(64), routed_dp_rank=1)
    placer_of(rank_table, dispatcher=dispatcher).place(req, [0, 1])
    assert req.routed_dp_rank == 1
    assert [state.num_waiting for state in dispatcher.states({0, 1})] == [0, 1]
    assert "policy" not in req.kv_hints.actions[-1].payload


def test_place_when_the_client_names_a_policy_then_that_one_decides(node):
    rank_table, _ = node
    wish = KvHintAction(action_id="a", action_type=hint.POLICY_ACTION, action_version="1", payload={"policy": "x"})
    req = request(range(64), kv_hints=KvHintsEnvelope(protocol_version="7", message_id="m", actions=[wish]))
    placer = placer_of(rank_table, dispatcher=Dispatcher(2, LMetric()))
    with pytest.raises(ValueError, match="policy 'x' is none of round_robin"):
        placer.place(req, [0, 1])
    # As good as none: the main process lets it pass.
    wish.payload["policy"] = None
    placer.place(req, [0, 1])
    req.kv_hints = KvHintsEnvelope(protocol_version="7", message_id="m", actions=[wish])
    wish.payload["policy"] = "round_robin"
    req.routed_dp_rank = None
    placer.place(req, [0, 1])
    assert req.kv_hints.protocol_version == "7"
    assert [action.action_type for action in req.kv_hints.actions] == [hint.ACTION_TYPE, hint.POLICY_ACTION]
    assert req.kv_hints.actions[0].payload["reason"] == "turn"


@pytest.mark.parametrize(
    ("fields", "session"), [({}, None), ({"routing_key": "k"}, "k"), ({"session_id": "s", "routing_key": "k"}, "s")]
)
def test_session_of_when_the_client_names_one_then_it_is_found(fields, session):
    assert session_of(request(range(4), **fields)) == session


def test_session_of_when_the_client_names_it_by_the_way_only_then_that_is_it():
    hints = kv_hints.with_action(None, hint.SESSION_ACTION, {"name": "n"})
    assert session_of(request(range(4), kv_hints=hints)) == "n"
    assert session_of(request(range(4), kv_hints=hints, routing_key="k")) == "k"


def dispatching(rank_table, monkeypatch, sent, read_snapshots=list, *, tokens_ahead=0, enable_metrics=False, **flags):
    """SGLang's controller with Banyan in front; what it sends, and where to, is in ``sent``."""
    rank_table.agree_on_page_tokens(PAGE)
    config, verified = Config(**{"policy": "lmetric", **flags}), []
    monkeypatch.setattr(controller.seams, "verify", verified.append)
    monkeypatch.setattr(runtime, "config", lambda: config)
    monkeypatch.setattr(runtime, "server_id", lambda: "id")
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: "null")
    carried = {"rank_table": rank_table.path, "server": "id", "config": config, "layout": LAYOUT}
    args = SimpleNamespace(
        _banyan={**carried, "tokens_ahead": tokens_ahead},
        # What the flag says of drafts is not asked: of a model with states it does not tell what keys are made of.
        speculative_algorithm="EAGLE",
        page_size=PAGE,
        enable_metrics=enable_metrics,
    )
    fake = SimpleNamespace(
        server_args=args,
        max_dp_size=2,
        dispatching=lambda req: sent.append(req.routed_dp_rank),
        dispatch_health_check=lambda req: sent.append(req.routed_dp_rank),
        _active_workers=[1],
        load_snapshot_reader=SimpleNamespace(read_all=read_snapshots),
    )
    controller.after_init_dispatcher(None, fake)
    assert verified == ["controller"], "without a hook that is needed nothing may be placed"
    return fake


def test_dispatch_when_sglang_chooses_and_no_rank_has_come_yet_then_no_hint(monkeypatch):
    req, sent = request(range(64)), []
    dispatching(RankTable.create(2), monkeypatch, sent, policy="sglang").dispatching(req)
    assert req.kv_hints is None and sent == [None]


def test_dispatch_when_sglang_chooses_then_only_the_hint_is_added(node, monkeypatch):
    rank_table, ranks = node
    ranks[1].frame_table.publish(frames(1), page_keys(list(range(16))))
    req, sent = request(range(64)), []
    fake = dispatching(rank_table, monkeypatch, sent, policy="sglang")
    fake.dispatching(req)
    (action,) = req.kv_hints.actions
    assert action.payload == {"dp_max_kv_len": 16, "dp_max_kv_rank": 1, "server": "id"}
    assert sent == [None] and fake.banyan_held is None and fake.banyan_watchdog is None


@pytest.mark.parametrize("ahead", [0, 1])
def test_dispatch_when_the_main_process_has_said_what_keys_are_made_of_then_pages_are_found_by_them(
    node, monkeypatch, ahead
):
    rank_table, ranks = node
    ids = list(range(64))
    ranks[1].frame_table.publish(frames(1, 2, 3), page_keys(ids, is_bigram=bool(ahead))[:3])
    asked = request(ids)
    fake = dispatching(rank_table, monkeypatch, [], tokens_ahead=ahead)
    fake._active_workers = [0, 1]
    fake.dispatching(asked)
    assert asked.kv_hints.actions[-1].payload["dp_max_kv_len"] == 48


def test_dispatch_when_too_many_are_held_then_the_next_one_is_placed_at_once(node, monkeypatch):
    sent = []
    fake = dispatching(node[0], monkeypatch, sent)
    fake._active_workers = [0, 1]
    monkeypatch.setattr(Placer, "place", lambda self, req, active: Wait(0, 16, 1.0))
    fake.dispatching(request(range(64)))
    assert sent == [] and fake.banyan_held.num_held == 1
    fake.banyan_held._held.extend([None] * MAX_HELD)
    fake.dispatching(request(range(64)))
    assert len(sent) == 1 and sent[0] in (0, 1)


@pytest.mark.parametrize(("factor", "num_hot_ranks"), [(2.0, 1), (math.inf, 0)])
def test_dispatch_when_a_rank_has_much_more_than_the_others_then_the_user_s_factor_says_whether_it_is_hot(
    node, monkeypatch, factor, num_hot_ranks
):
    fake = dispatching(node[0], monkeypatch, [], hot_rank_factor=factor)
    fake._active_workers = [0, 1]
    fake.dispatching(request(range(4096), routed_dp_rank=1))
    asked = request(range(9000, 9064))
    fake.dispatching(asked)
    assert asked.kv_hints.actions[-1].payload["num_hot_ranks"] == num_hot_ranks


def test_dispatch_when_a_hook_of_placement_is_missing_in_this_process_then_sglang_dispatches(node, monkeypatch):
    """Held requests are sent on by the loop: without it, none may be held."""
    sent = []
    runtime.switch_off("placement")
    fake = dispatching(node[0], monkeypatch, sent)
    fake.dispatching(request(range(64)))
    assert sent == [None] and fake.banyan_held is None


def test_dispatch_when_the_server_s_health_is_checked_then_each_rank_in_turn_and_one_that_stands_still_is_known(
    node, monkeypatch
):
    sent, silent = [], []
    fake = dispatching(node[0], monkeypatch, sent, lambda: [LoadSnapshot(timestamp=time.time(), dp_rank=0)])
    fake._active_workers = [0, 1]
    fake.banyan_watchdog._tell = silent.append
    for _ in range(4):
        fake.dispatch_health_check(request([0]))
    assert sent == [0, 1, 0, 1]
    fake.banyan_watchdog.look(time.monotonic() + SILENCE_S)
    assert silent == [{1}], "nobody has asked for anything else"
    fake._active_workers = [0]
    fake.banyan_watchdog.look(time.monotonic() + 2 * SILENCE_S)
    assert silent == [{1}, set()], "SGLang has taken it out"
    fake._active_workers = []
    fake.dispatch_health_check(request([0]))
    assert sent[-1] is None, "SGLang says so"


def test_dispatch_when_a_rank_stands_still_then_metrics_say_so_though_no_rank_shows_anything(node, monkeypatch):
    shown = Mock()
    monkeypatch.setattr("prometheus_client.Gauge", shown)
    fake = dispatching(node[0], monkeypatch, [], lambda: [], enable_metrics=True)
    assert shown.call_args.args[0] == "banyan:num_silent_ranks"
    fake.dispatch_health_check(request([0]))
    fake.banyan_watchdog.look(time.monotonic() + SILENCE_S)
    assert [call.args for call in shown.return_value.set.call_args_list] == [(0,), (1,)]
    assert node[0].num_silent == 1


@pytest.mark.parametrize("policy", ["lmetric", "round_robin", "session_sticky"])
def test_dispatch_when_an_idle_rank_stands_still_then_what_may_go_to_a_busy_one_does(node, monkeypatch, policy):
    sent, reports = [], [LoadSnapshot(timestamp=time.time(), dp_rank=0, num_running_reqs=64)]
    fake = dispatching(node[0], monkeypatch, sent, lambda: reports, policy=policy)
    fake._active_workers = [0, 1]
    fake.dispatching(request(range(16), session_id="a", routed_dp_rank=1))
    turns = {
        name: request(range(16), session_params=SessionParams(id=name), session_id=name) for name in map(str, range(8))
    }
    for turn in turns.values():
        fake.dispatching(turn)
    homes, reports[:] = {name: turn.routed_dp_rank for name, turn in turns.items()}, []
    assert set(homes.values()) == {0, 1}
    reports.append(LoadSnapshot(timestamp=time.time(), dp_rank=0, num_running_reqs=64))
    fake.banyan_watchdog.look(time.monotonic() + 2 * SILENCE_S)
    sent.clear()
    for _ in range(40):
        fake.dispatching(request(range(16), session_id="a"))
    assert set(sent) == {0}
    for _ in range(2):
        fake.dispatch_health_check(request([0]))
    assert sent[-2:] == [0, 1], "it is asked whether it goes on"
    for name, home in homes.items():
        again = request(range(16), session_params=SessionParams(id=name))
        fake.dispatching(again)
        assert again.routed_dp_rank == home, "no other rank knows its turns"
    fake.dispatching(request(range(16), routed_dp_rank=1))
    assert sent[-1] == 1, "the client has said so"
    fake._active_workers = [1]
    fake.dispatching(request(range(16)))
    assert sent[-1] == 1, "there is no other"


def test_dispatch_when_placing_a_check_of_health_fails_then_sglang_sends_it_and_the_fault_is_counted(node, monkeypatch):
    def fail(self, check, active):
        raise RuntimeError("nobody thought of this")

    sent, before = [], faults.counts()
    monkeypatch.setattr(Placer, "place_check", fail)
    fake = dispatching(node[0], monkeypatch, sent)
    fake.dispatch_health_check(request([0]))
    assert sent == [None]
    assert faults.counts()["Placer.place_check"] == before.get("Placer.place_check", 0) + 1


def test_dispatch_when_no_rank_is_active_then_sglangs_own_method_dispatches_and_nothing_is_a_fault(node, monkeypatch):
    sent, before = [], faults.counts()
    fake = dispatching(node[0], monkeypatch, sent)
    fake.dispatching(request(range(64)))
    fake._active_workers = []
    fake.dispatching(request(range(64)))
    assert sent == [1, None] and faults.counts() == before


def test_dispatch_when_placing_fails_then_sglangs_own_method_dispatches_and_the_fault_is_counted(
    node, monkeypatch, caplog
):
    sent = []
    fake = dispatching(node[0], monkeypatch, sent)
    monkeypatch.setattr(faults, "_counts", Counter())
    monkeypatch.setattr(Placer, "place", lambda self, req, active: 1 / 0)
    fake.dispatching(request(range(64)))
    assert sent == [None] and faults.counts() == {"dispatcher.place": 1}
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("space", [{"cache_salt": "\ud800"}, {"extra_key": "\ud800"}])
def test_dispatch_when_a_cache_namespace_is_no_unicode_then_it_is_sent_all_the_same(node, monkeypatch, space):
    sent = []
    dispatching(node[0], monkeypatch, sent).dispatching(request(range(64), **space))
    assert len(sent) == 1


def received(num_tokens):
    return SimpleNamespace(input_ids=[0] * num_tokens)


@pytest.mark.parametrize(
    ("policy", "num_ranks", "came", "published"),
    [
        ("lmetric", 1, [received(256)], 1),
        ("lmetric", 1, [received(100)] * 3, 1),
        ("lmetric", 1, [SimpleNamespace(input_ids=None)], 1),
        ("lmetric", 1, [SimpleNamespace(batch=[received(1)])], 1),
        ("lmetric", 1, [received(255), SimpleNamespace(rid="an abort")], 0),
        ("lmetric", 2, [received(1)], 1),
        ("lmetric", 2, [], 0),
        ("sglang", 2, [received(256)], 0),
    ],
    ids=["a prompt", "several", "an embedding", "a batch", "too little", "one of two ranks", "nothing", "SGLang's"],
)
def test_load_when_requests_come_in_then_it_is_published_at_once(monkeypatch, policy, num_ranks, came, published):
    scheduler, told = telling(monkeypatch, Config(policy=policy), num_ranks)
    load_report.after_process_input_requests(None, scheduler, came)
    assert told == [(True, "snapshot")] * published


def telling(monkeypatch, config, num_ranks):
    """A scheduler that has told nothing yet; what it tells."""
    monkeypatch.setattr(runtime, "config", lambda: config)
    monkeypatch.setattr(load_report, "_is_owed", False)
    monkeypatch.setattr(load_report, "_may_tell_s", 0.0)
    told = []
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(dp_size=num_ranks),
        publish_load_snapshot=lambda force: "snapshot" if force else None,
        load_inquirer=SimpleNamespace(get_loads=None),
        load_publisher=SimpleNamespace(publish_load_stat=lambda _, force, snapshot: told.append((force, snapshot))),
    )
    return scheduler, told


def test_load_when_requests_come_in_each_short_step_then_it_is_told_so_often_and_the_last_of_them_too(monkeypatch):
    scheduler, told = telling(monkeypatch, Config(policy="lmetric"), 2)
    steps = ((5.000, 1, 1), (5.001, 1, 1), (5.002, 1, 1), (5.004, 0, 1), (5.006, 0, 2), (5.020, 0, 2))
    for now_s, num_came, num_told in steps:
        monkeypatch.setattr(load_report, "time", SimpleNamespace(monotonic=lambda now_s=now_s: now_s))
        load_report.after_process_input_requests(None, scheduler, [received(1)] * num_came)
        assert len(told) == num_told


def test_request_when_it_is_created_then_it_carries_the_hint_and_is_counted(node, monkeypatch):
    rank_table, ranks = node
    monkeypatch.setattr(runtime, "config", Config)
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    counters = Counters()
    monkeypatch.setattr(linker, "_installed", SimpleNamespace(arrive=lambda rid: None, counters=counters))
    ids = list(range(64))
    ranks[1].frame_table.publish(frames(1), page_keys(ids[:16]))
    sent = request(ids, routing_key="mine")
    placer_of(rank_table, dispatcher=Dispatcher(2, LMetric())).place(sent, [0, 1])

    class Req(Matched):
        rid, kv_hints, origin_input_ids, output_ids = "r", sent.kv_hints, ids, []

    req = Req()
    hooks.after_create_generation_req(req, None, sent)
    assert (req.dp_origin_kv_len, req.dp_max_kv_len, req.dp_max_kv_rank) == (0, 16, 1)
    assert (counters.placed_cache, counters.placed_pinned, req.banyan_session) == (1, 0, "mine")
    name = requests.id_of(req)
    assert requests.facts(name, 16).prompt_tokens == 64
    del req
    assert requests.facts(name, 16).prompt_tokens is None


class StopLoop(Exception):
    pass


def test_probe_when_a_prompt_is_longer_than_is_compared_then_the_rest_is_not_hashed(node):
    """By what was sent ranks on other nodes are known; such a prompt is not to push all others out."""
    rank_table, _ = node
    layout = Layout(dp=1, attn_dp=4, attn_cp=1, attn_tp=1, num_nodes=2, node=0)
    found = probe_of(rank_table, layout=layout).look_up(request(range((MOST_PIECES + 10) * PIECE_TOKENS)))
    assert len(found.pieces) == MOST_PIECES


def test_event_loop_when_messages_come_then_all_are_dispatched_in_order(monkeypatch):
    monkeypatch.setattr(runtime, "config", Config)
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
    fake = SimpleNamespace(
        **{"recv_from_tokenizer": receiver, "soft_watchdog": watchdog, "_request_dispatcher": dispatch},
        **{"banyan_held": None, "server_args": SimpleNamespace(elastic_ep_backend=None), "scheduler_procs": []},
    )
    try:
        with pytest.raises(StopLoop):
            controller.around_event_loop(None, fake)
    finally:
        context.destroy(linger=0)
    assert seen == [0, 1, 2]


def test_event_loop_when_it_fails_then_what_is_held_is_sent_on_for_sglangs_own_loop_does_not(monkeypatch):
    monkeypatch.setattr(runtime, "config", Config)
    context = zmq.Context()
    ended = []

    class Held:
        num_held = 1

        def send_on(self, active):
            raise StopLoop

        def hold_no_more(self, active):
            ended.append(active)

    fake = SimpleNamespace(
        **{"recv_from_tokenizer": context.socket(zmq.PULL), "soft_watchdog": SimpleNamespace(feed=lambda: None)},
        **{"banyan_held": Held(), "server_args": SimpleNamespace(elastic_ep_backend=None), "scheduler_procs": []},
        _active_workers=[0],
    )
    try:
        with pytest.raises(StopLoop):
            controller.around_event_loop(None, fake)
    finally:
        context.destroy(linger=0)
    assert ended == [[0]]


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


def test_session_when_a_policy_would_part_its_turns_then_they_go_to_one_rank_that_nobody_elses_name_changes(node):
    rank_table, _ = node
    placer = placer_of(rank_table, dispatcher=Dispatcher(2, POLICIES["round_robin"]()))
    ranks = {}
    for session in "abcdefgh":
        turns = [request(range(8), session_params=SessionParams(id=session)) for _ in range(3)]
        for turn in turns:
            placer.place(request(range(8), session_id=session), [0, 1])
            assert placer.place(turn, [0, 1]) is None
        (ranks[session],) = {turn.routed_dp_rank for turn in turns}
        said = kv_hints.payload_of(turns[0].kv_hints, hint.ACTION_TYPE)
        assert hint.PrefixHint.from_payload(said).decision.reason is Reason.SESSION
    assert set(ranks.values()) == {0, 1}
    pinned = request(range(8), session_params=SessionParams(id="a"), routed_dp_rank=1 - ranks["a"])
    placer.place(pinned, [0, 1])
    assert pinned.routed_dp_rank != ranks["a"]
