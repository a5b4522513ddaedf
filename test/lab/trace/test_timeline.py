# SPDX-License-Identifier: Apache-2.0
"""Tracks of one request, and the file made of them, held against the trace event format."""

import json

import pytest

from banyan_lab.trace.collector import Span
from banyan_lab.trace.timeline import (
    CLIENT,
    DISPATCHER,
    FIRST_TOKEN,
    HTTP,
    Step,
    chrome_trace,
    is_whole,
    took_ms,
    tracks_of,
)

MS = 1_000_000


def span(name, id, parent, start_ms, end_ms, **attributes):
    return Span(name, id, parent, round(start_ms * MS), round(end_ms * MS), attributes)


def made_spans():
    """What SGLang and Banyan send for a request that rank 1 fetches half of, in no order."""
    return [
        span("banyan.copy", "c", "s", 15, 23, **{"banyan.peer_tokens": 64, "banyan.outcome": "landed"}),
        span("banyan.landing", "c0", "s", 15.5, 17, **{"banyan.layer": 0}),
        span("banyan.landing", "c1", "s", 17, 23, **{"banyan.layer": 1}),
        span("prefill_forward", "p", "s", 16, 30),
        span("banyan.layer", "l0", "p", 18, 21, **{"banyan.layer": 0}),
        span("banyan.wait", "w1", "p", 21, 23, **{"banyan.layer": 1}),
        span("prefill_waiting", "q", "s", 6, 16),
        span("banyan.lookup", "u", "s", 7, 7.5, **{"banyan.found.peer_pages": 4}),
        span("banyan.placed", "d1", "s", 5, 5, **{"banyan.policy": "lmetric", "banyan.reason": "cache"}),
        span("request_process", "r", "s", 4.5, 6),
        span("dpc_dispatch", "d", "dt", 3, 4),
        span("tokenize", "t", "ht", 1.2, 2),
        span("Scheduler [DP 1]", "s", "root", 4.5, 40, thread_label="Scheduler", dp_rank=1, tp_rank=0),
        span("DP Controller", "dt", "root", 3, 4, thread_label="DP Controller"),
        span("Tokenizer", "ht", "root", 1.2, 2.5, thread_label="Tokenizer"),
        span(" Req abc", "root", "caller", 1.2, 41, rid="abc", module="sglang::request"),
    ]


def client_steps():
    return [Step(FIRST_TOKEN, MS, 35 * MS, {"cached_tokens": 64}), Step("the rest", 35 * MS, 42 * MS)]


@pytest.fixture
def tracks():
    return tracks_of(made_spans(), client_steps())


def test_tracks_when_made_then_each_process_has_its_own_and_copies_and_layers_lie_beside_their_rank(tracks):
    assert list(tracks) == [CLIENT, HTTP, DISPATCHER, "rank 1", "rank 1: copies", "rank 1: layers"]
    assert [step.name for step in tracks["rank 1"]] == ["take in", "wait for its turn", "look up and plan", "prefill"]
    assert [step.name for step in tracks["rank 1: copies"]] == ["copy", "land layer 0", "land layer 1"]
    assert [step.name for step in tracks["rank 1: layers"]] == ["compute layer 0", "wait for layer 1"]
    assert [step.name for step in tracks[HTTP]] == ["request", "tokenize"]


def test_tracks_when_the_rank_tells_why_it_was_chosen_then_the_dispatch_says_so(tracks):
    (dispatch,) = tracks[DISPATCHER]
    assert dispatch.told == {"policy": "lmetric", "reason": "cache"} and dispatch.took_ms == 1


def test_tracks_when_nobody_shares_then_there_are_none_of_copies():
    spans = [one for one in made_spans() if not one.name.startswith("banyan.")]
    assert list(tracks_of(spans, client_steps())) == [CLIENT, HTTP, DISPATCHER, "rank 1"]


def test_tracks_when_a_rank_has_several_shards_and_a_thread_is_unknown_then_each_has_its_name():
    spans = [
        span("x", "1", "s", 0, 1),
        span("S", "s", "root", 0, 1, thread_label="Prefill Scheduler", dp_rank=0, tp_rank=3),
        span("y", "2", "m", 0, 1),
        span("M", "m", "root", 0, 1, thread_label="transfer worker 1"),
    ]
    assert list(tracks_of(spans, client_steps())) == [CLIENT, "rank 0, shard 3", "transfer worker 1"]


def test_tracks_when_a_span_is_its_own_ancestor_then_it_lies_beside_the_others():
    spans = [span("x", "1", "2", 0, 1), span("y", "2", "1", 0, 1), span("z", "3", "3", 0, 1)]
    assert list(tracks_of(spans, client_steps())) == [CLIENT, "other"]


@pytest.mark.parametrize("missing", ["root", "s"])
def test_whole_when_a_parent_has_not_come_then_not(missing):
    assert is_whole(made_spans())
    assert not is_whole([one for one in made_spans() if one.id != missing])
    assert not is_whole([])


def test_took_when_a_step_is_of_layers_then_all_of_them_and_when_there_is_none_then_none(tracks):
    assert took_ms(tracks, "land") == pytest.approx(7.5)
    assert took_ms(tracks, "copy") == 8 and took_ms(tracks, FIRST_TOKEN) == 34
    assert took_ms(tracks, "decode") is None


def test_took_when_a_rank_has_several_shards_then_what_the_slowest_took_and_not_all_of_them():
    spans = [span(f"S{shard}", f"s{shard}", "root", 0, 9, thread_label="Scheduler", tp_rank=shard) for shard in (0, 1)]
    for shard, took in ((0, 3), (1, 2)):
        spans += [
            span("prefill_forward", f"p{shard}", f"s{shard}", 1, 1 + took),
            span("prefill_forward", f"q{shard}", f"s{shard}", 5, 5 + took),
            span("banyan.wait", f"w{shard}", f"s{shard}", 1, 1 + took, **{"banyan.layer": 0}),
        ]
    tracks = tracks_of(spans, client_steps())
    assert took_ms(tracks, "prefill") == 6 and took_ms(tracks, "wait for") == 3


def test_file_when_parsed_then_it_is_of_the_trace_event_format(tracks):
    other = tracks_of([one for one in made_spans() if not one.name.startswith("banyan.")], client_steps())
    file = json.loads(json.dumps(chrome_trace({"a (Banyan)": tracks, "b": other}, {"command": ["x"]})))
    assert file["otherData"] == {"command": ["x"]} and file["displayTimeUnit"] in ("ms", "ns")
    events = file["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M", "i") and isinstance(event["name"], str) and event["ts"] >= 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["args"], dict)
        assert isinstance(event["ts"], int) and (event["ph"] != "X" or isinstance(event["dur"], int))
        assert event["ph"] != "i" or event["s"] == "t"
    named = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert named == {1: "a (Banyan)", 2: "b"}
    threads = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in events if one["ph"] != "M"} == threads
    # The client begins at 0 on every server.
    assert [one["ts"] for one in events if one["name"] == FIRST_TOKEN] == [0, 0]
    copy = next(one for one in events if one["name"] == "copy")
    assert (copy["ts"], copy["dur"], copy["args"]) == (14000, 8000, {"peer_tokens": 64, "outcome": "landed"})


def test_file_when_a_step_ends_with_the_one_around_it_then_it_does_so_in_the_file_whatever_the_fractions():
    for shift_ns in range(0, 3000, 7):
        outer = Step("o", shift_ns, 10_000_001)
        inner = Step("i", shift_ns + 333, 10_000_001)
        file = chrome_trace({"s": {CLIENT: [Step(FIRST_TOKEN, 0, 20)], "rank 0": [outer, inner]}}, {})
        ends = {one["name"]: one["ts"] + one["dur"] for one in file["traceEvents"] if one["ph"] == "X"}
        assert ends["o"] == ends["i"]


def test_file_when_steps_of_a_track_overlap_then_they_are_on_tracks_of_one_name_and_each_is_nested():
    steps = [Step("a", 0, 10), Step("b", 5, 15), Step("c", 6, 9), Step("d", 12, 20), Step("e", 20, 20)]
    file = chrome_trace({"s": {CLIENT: [Step(FIRST_TOKEN, 0, 20)], "rank 0": steps}}, {})
    tids = [
        one["tid"] for one in file["traceEvents"] if one["name"] == "thread_name" and one["args"] == {"name": "rank 0"}
    ]
    lanes = [[one for one in file["traceEvents"] if one["tid"] == tid and one["ph"] != "M"] for tid in tids]
    assert [[one["name"] for one in lane] for lane in lanes] == [["a", "c", "d", "e"], ["b"]]
