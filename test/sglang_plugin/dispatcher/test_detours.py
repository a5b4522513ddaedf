# SPDX-License-Identifier: Apache-2.0
"""Requests held back while another rank computes their prompt: each way in which the wait can end."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import AbortReq, PickleWrapper, msgpack_decode, msgpack_encode
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope
from sglang.srt.managers.load_snapshot import LoadSnapshot
from test.sglang_plugin.dispatcher.dispatch_rig import page_keys, placer_of, request
from test.unit.directory.rig import Rank, frames

from banyan._native import Roster
from banyan.routing import Dispatcher, ElasticPrefill, hint
from banyan.routing.lmetric import LMetric
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.dispatcher.detours import GRACE_S, IDLE_S, PATIENCE, Detours, prefill_of
from banyan.sglang_plugin.kv_hints import is_detour
from banyan.sglang_plugin.rank import hooks, linker
from banyan.telemetry import Counters

IDS = list(range(200))
BOTH = (0, 1)


def snapshot(rank, *, taken_s=1.0, num_running=0, num_prefilled=1_000):
    return LoadSnapshot(
        timestamp=taken_s,
        dp_rank=rank,
        num_running_reqs=num_running,
        total_prefill_uncached_tokens=num_prefilled,
        total_prefill_busy_us=1_000_000,
    )


class Rig:
    """Rank 0 has the session "s" and decodes; rank 1 is idle. What is sent is in ``sent``."""

    def __init__(self, *, elastic=None):
        self.roster = Roster.create(2)
        self.ranks = [Rank(self.roster, slot) for slot in range(2)]
        self.snapshots = [snapshot(0, num_running=1), snapshot(1)]
        self.dispatcher = Dispatcher(2, LMetric())
        self.placer = placer_of(
            self.roster, dispatcher=self.dispatcher, snapshots=self.snapshots, elastic=elastic or ElasticPrefill(100)
        )
        self.placer._read_snapshots = lambda: self.snapshots
        self.sent = []
        self.now_s = 50.0
        self.detours = Detours(self.placer, self.sent.append, clock=lambda: self.now_s)
        first = request(IDS[:32], rid="first", session_id="s", routed_dp_rank=0)
        self.placer.place(first, BOTH)
        # It decodes: the prompt has been computed, and its pages are gone again.
        decoding = snapshot(0, taken_s=1e12, num_running=1, num_prefilled=2_000)
        self.snapshots = [decoding, snapshot(1, taken_s=1e12)]

    def begin(self, **extra):
        req = request(IDS, session_id="s", **extra)
        detour = self.placer.place(req, BOTH)
        assert detour is not None
        self.detours.begin(req, detour)
        return req

    def publish(self, num_pages):
        self.ranks[1].shelf.publish(frames(*range(num_pages)), page_keys(IDS[: 16 * num_pages]))

    def told(self):
        return self.sent[-1].kv_hints.actions[0].payload


def busy(rig):
    """The idle rank has the prefill, and says so."""
    rig.snapshots = [rig.snapshots[0], snapshot(1, taken_s=2e12, num_running=1)]


def test_detour_when_it_begins_then_only_the_prefill_is_sent():
    rig = Rig()
    req = rig.begin()
    (prefill,) = rig.sent
    assert (prefill.rid.partition("-")[0], prefill.routed_dp_rank) == ("r", 1)
    assert prefill.input_ids == req.input_ids and prefill.sampling_params.max_new_tokens == 1
    assert (req.routed_dp_rank, rig.detours.num_held) == (None, 1)
    assert rig.dispatcher.states(BOTH)[1].pending_prefill_tokens == 200, "the rank is not idle for the next one"


def test_held_when_the_pages_have_landed_then_it_goes_to_its_sessions_rank():
    rig = Rig()
    req = rig.begin()
    busy(rig)
    rig.publish(11)
    rig.detours.send_on(BOTH)
    assert rig.detours.num_held == 1, "one page is missing"
    rig.ranks[1].shelf.publish(frames(11), page_keys(IDS[:192])[11:])
    rig.now_s += 0.25
    rig.detours.send_on(BOTH)
    assert rig.sent[1:] == [req] and req.routed_dp_rank == 0 and rig.detours.num_held == 0
    told = rig.told()
    assert (told["dp_max_kv_len"], told["dp_max_kv_rank"]) == (192, 1)
    assert (told["reason"], told["held_us"], told["held_until"]) == ("detour", 250_000, "landed")
    assert rig.dispatcher.states(BOTH)[0].num_waiting == 1
    rig.detours.send_on(BOTH)
    assert len(rig.sent) == 2, "sent on exactly once"


def test_held_when_the_other_rank_has_nothing_to_do_any_more_then_it_is_not_waited_for():
    rig = Rig()
    req = rig.begin()
    rig.detours.send_on(BOTH)
    assert rig.detours.num_held == 1, "its load was reported before it had the prefill"
    rig.snapshots = [rig.snapshots[0], snapshot(1, taken_s=2e12)]
    rig.detours.send_on(BOTH)
    assert rig.detours.num_held == 1, "its pages may be about to be published"
    rig.now_s += IDLE_S
    rig.detours.send_on(BOTH)
    assert rig.sent[1:] == [req] and rig.told()["held_until"] == "given_up"


def test_held_when_the_prefill_takes_too_long_then_it_goes_without():
    rig = Rig()
    req = rig.begin()
    busy(rig)
    rig.now_s += PATIENCE * 0.2 + GRACE_S - 0.01
    rig.detours.send_on(BOTH)
    assert rig.detours.num_held == 1
    rig.now_s += 0.02
    rig.detours.send_on(BOTH)
    assert rig.sent[1:] == [req] and rig.told()["held_until"] == "late"


@pytest.mark.parametrize("abort", [AbortReq(rid="r"), AbortReq(abort_all=True)])
def test_held_when_it_is_aborted_then_its_rank_hears_of_it_first(abort):
    rig = Rig()
    req = rig.begin()
    rig.detours.abort(AbortReq(rid="another"), BOTH)
    assert rig.detours.num_held == 1
    rig.detours.abort(abort, BOTH)
    assert rig.sent[1:] == [req] and req.routed_dp_rank == 0 and rig.detours.num_held == 0
    assert rig.sent[0].rid.startswith(req.rid), "SGLang aborts by prefix: the prefill ends too"


@pytest.mark.parametrize(("active", "rank"), [((0,), 0), ((1,), 1)])
def test_held_when_a_rank_is_no_longer_active_then_the_policy_chooses_anew(active, rank):
    rig = Rig()
    req = rig.begin()
    rig.detours.send_on(active)
    assert rig.sent[1:] == [req] and req.routed_dp_rank == rank
    assert rig.told()["policy"] == "lmetric"


def test_held_when_no_rank_is_left_then_sglang_gets_it_all_the_same(caplog):
    rig = Rig()
    req = rig.begin()
    rig.detours.send_on(())
    assert rig.sent[1:] == [req] and "NoActiveRank" in caplog.text


@pytest.mark.parametrize(
    "kind",
    [{"routed_dp_rank": 1}, {"return_logprob": True}, {"session_id": None}, {"input_embeds": [[0.5]]}],
    ids=str,
)
def test_place_when_a_prefill_elsewhere_could_not_stand_for_it_then_no_detour(kind):
    rig = Rig()
    assert rig.placer.place(request(IDS, **{"session_id": "s", **kind}), BOTH) is None


@pytest.mark.parametrize(("wish", "is_held"), [(None, False), (100, True), (201, False)])
def test_place_when_the_client_sets_the_gate_then_that_counts(wish, is_held):
    rig = Rig(elastic=ElasticPrefill(10_000) if wish is not None else None)
    action = KvHintAction(
        action_id="a",
        action_type=hint.POLICY_ACTION,
        action_version="1",
        payload={"elastic_prefill_tokens": wish},
    )
    hints = KvHintsEnvelope(protocol_version="1", message_id="m", actions=[action])
    assert (rig.placer.place(request(IDS, session_id="s", kv_hints=hints), BOTH) is not None) == is_held


def test_prefill_when_it_crosses_a_process_border_then_only_this_server_knows_it(monkeypatch):
    sent = prefill_of(request(IDS, cache_salt="salt", time_stats=PickleWrapper(b"x")), 1)
    got = msgpack_decode(msgpack_encode(sent))
    assert got.cache_salt == "salt" and list(got.input_ids) == IDS
    assert not is_detour(None), "asked of every request, also where no server runs"
    assert got.rid.startswith("r") and got.rid != prefill_of(request(IDS), 1).rid, "no client can have the same"
    assert is_detour(got.kv_hints)
    monkeypatch.setattr(runtime, "server_id", lambda: "another server")
    assert not is_detour(got.kv_hints)


@pytest.mark.parametrize(("server", "num_detours"), [("this server", 1), ("forged", 0)])
def test_request_when_it_is_a_prefill_for_another_rank_then_nobody_is_answered(monkeypatch, server, num_detours):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    counters = Counters()
    monkeypatch.setattr(linker, "_installed", SimpleNamespace(arrive=lambda rid: None, counters=counters))
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "server_id", lambda: server)
        sent = prefill_of(request(IDS), 1)

    class Req:
        rid, kv_hints, finished_output = sent.rid, sent.kv_hints, None

    req = Req()
    hooks.after_create_generation_req(req, None, sent)
    assert (req.finished_output, counters.detours) == ((True, 1) if num_detours else (None, 0))
    assert counters.placed_pinned == 1 - num_detours


@pytest.mark.parametrize(("until", "num_late"), [("landed", 0), ("late", 1), ("given_up", 1)])
def test_request_when_it_was_held_back_then_its_rank_counts_how_long(until, num_late):
    counters = Counters()
    hooks._count_placement(counters, hint.Decision("lmetric", "detour", 0, 5, 1_500, until), is_pinned=True)
    assert (counters.placed_detour, counters.detour_us, counters.detours_late) == (1, 1_500, num_late)
