# SPDX-License-Identifier: Apache-2.0
"""Playing traces: order, pace, cold starts, figures. The server is a fake; times are short and only ordered."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from bench_fakes import record

from banyan_lab.replay import Pace, Skew, Trace, TraceRequest, Vocabulary, skewed_trace
from benchmark import policy_table, replay, trace_replay
from benchmark.records import Answer
from benchmark.replay import WarmStart, Workload, follow_ups, imbalance, play, play_cold, summary
from benchmark.results import read_lines

WORDS = Vocabulary(10, 99)


def workload_of(*requests, pace=None, token_scale=1.0):
    trace = Trace("t", 16, tuple(requests))
    return Workload.of(trace, pace or Pace(), WORDS, token_scale=token_scale, seed=1)


class FakeClient:
    """Answers after `answer_s`; remembers who was under way together."""

    def __init__(self, answer_s=0.01, cached=(), fails=()):
        self.answer_s = answer_s
        self.cached = dict(cached)
        self.fails = set(fails)
        self.asked = []
        self.open = set()
        self.most_open = 0

    async def answer(self, messages, token_ids, output_len, *, routing_key=None):
        number = len(self.asked)
        self.asked.append((routing_key, tuple(token_ids), output_len))
        assert routing_key not in self.open, "two turns of one session at once"
        self.open.add(routing_key)
        self.most_open = max(self.most_open, len(self.open))
        await asyncio.sleep(self.answer_s)
        self.open.discard(routing_key)
        return Answer(
            ttft_s=self.answer_s,
            latency_s=self.answer_s,
            prompt_tokens=len(token_ids),
            cached_tokens=self.cached.get(number, 0),
            dp_rank=number % 2,
            error="refused" if number in self.fails else "",
        )


def run(workload, client):
    arrived = []
    # asyncio's own loop, whatever an imported engine has made the default: uvloop counts time in whole milliseconds.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        records, _ = runner.run(play(workload, client, arrived=arrived.append))
    assert sorted(arrived, key=lambda record: record.position) == records
    return records


def test_play_when_sessions_overlap_then_their_turns_follow_each_other():
    requests = [TraceRequest(f"s{n}", turn, 0.0, 32, 4) for turn in range(3) for n in range(4)]
    client = FakeClient()
    records = run(workload_of(*requests), client)
    assert [(r.script_id, r.turn) for r in records] == [(r.session, r.turn) for r in requests]
    assert client.most_open == 4
    for name in ("s0", "s3"):
        sent = [r.sent_s for r in records if r.script_id == name]
        assert sent == sorted(sent)


def test_play_when_sessions_are_limited_then_no_more_are_under_way():
    requests = [TraceRequest(f"s{n}", 0, 0.0, 32, 4) for n in range(6)]
    client = FakeClient()
    assert len(run(workload_of(*requests, pace=Pace(max_inflight_sessions=2)), client)) == 6
    assert client.most_open == 2


def test_play_when_users_think_then_the_next_turn_waits_for_them():
    requests = [TraceRequest("a", 0, 0.0, 32, 4), TraceRequest("a", 1, 0.0, 32, 4, think_s=0.1)]
    first, second = run(workload_of(*requests, pace=Pace(time_scale=0.5)), FakeClient())
    assert second.sent_s - first.sent_s >= 0.06


def test_play_when_a_turn_fails_then_it_is_recorded_and_the_session_goes_on():
    requests = [TraceRequest("a", turn, 0.0, 32, 4) for turn in range(3)]
    records = run(workload_of(*requests), FakeClient(fails={1}))
    assert [bool(record.answer.error) for record in records] == [False, True, False]


@pytest.mark.parametrize(("cached", "is_cold"), [({}, True), ({1: 16}, True), ({0: 16}, False)])
def test_play_cold_when_the_first_answer_was_cached_then_the_run_is_void(monkeypatch, cached, is_cold):
    flushed = []

    async def flush(url):
        flushed.append(url)

    monkeypatch.setattr(replay, "flush_cache", flush)
    workload = workload_of(TraceRequest("a", 0, 0.0, 32, 4), TraceRequest("a", 1, 0.0, 32, 4))

    def cold():
        return asyncio.run(play_cold("http://server", workload, FakeClient(cached=cached), arrived=lambda _: None))

    if is_cold:
        assert len(cold()[0]) == 2
    else:
        with pytest.raises(WarmStart, match="16 cached tokens"):
            cold()
    assert flushed == ["http://server"]


def test_summary_when_requests_are_of_several_classes_then_each_has_its_figures():
    requests = [
        TraceRequest("a", 0, 0.0, 6_000, 4, ((0, 375),)),
        TraceRequest("a", 1, 1.0, 6_100, 4, ((0, 381),)),
        TraceRequest("b", 0, 2.0, 30_000, 4, ((900, 1_875),)),
    ]
    workload = workload_of(*requests)
    records = [record(position=n, ttft_s=float(n + 1), dp_rank=n % 2, cached_tokens=20) for n in range(3)]
    figures = summary(workload, records, total_time_s=3.0)
    by_class = {
        name: (some["num_requests"], some["ttft_s"] and some["ttft_s"]["p50"])
        for name, some in figures["by_class"].items()
    }
    assert by_class == {"warm": (1, 2.0), "medium": (1, 1.0), "heavy": (1, 3.0)}
    assert figures["imbalance"]["num_requests"] == pytest.approx(4 / 3, abs=1e-4)
    assert figures["ideal_cached_share"] == pytest.approx(6_000 / 42_100, abs=1e-5)


def test_follow_ups_when_a_turn_runs_on_another_rank_then_it_has_moved():
    turns = [("a", 0, 0), ("a", 1, 0), ("a", 2, 1), ("b", 0, 1), ("b", 2, 0), ("c", 0, None), ("c", 1, 1)]
    records = [
        replace(record(name, position=n, ttft_s=float(n), dp_rank=rank), turn=turn)
        for n, (name, turn, rank) in enumerate(turns)
    ]
    found = follow_ups(records)
    assert {place: some["num_requests"] for place, some in found.items()} == {"moved": 1, "stayed": 1}
    assert (found["stayed"]["ttft_s"]["mean"], found["moved"]["ttft_s"]["mean"]) == (1.0, 2.0)
    failed = [replace(one, answer=replace(one.answer, error="gone")) for one in records]
    assert follow_ups(failed)["moved"] == {"num_requests": 0, "ttft_s": None}


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ([[0, 0], [32, 16], [48, 48], [0, 16]], {"most_tokens": 48, "waiting_share": 0.75, "uneven_share": 0.5}),
        ([], {"most_tokens": 0, "waiting_share": None, "uneven_share": None}),
    ],
)
def test_read_queues_when_ranks_wait_then_how_long_and_how_often(looks, told):
    assert trace_replay.read_queues(looks) == {"num_looks": len(looks), **told}


def test_imbalance_when_nothing_was_served_then_unknown():
    assert imbalance({}) == {"num_requests": None, "prompt_tokens": None, "uncached_tokens": None}


def test_describe_when_called_then_it_says_what_would_be_played_and_sends_nothing(capsys):
    assert trace_replay.main(["--trace", "skewed", "--num-requests", "9", "describe"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["played"]["num_requests"] == 9
    assert shown["sample"]["num_window_requests"] == len(skewed_trace(Skew()).requests)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--trace", "skewed", "--sample-ratio", "2"], "--sample-ratio"),
        (["--trace", "skewed", "--vocabulary", "9"], "--vocabulary"),
        (["--trace", "skewed", "--num-requests", "-5"], "--num-requests"),
        (["--trace", "skewed", "--num-requests", "0"], "--num-requests"),
    ],
)
def test_trace_replay_when_an_option_is_wrong_then_it_is_named(options, says, capsys):
    assert trace_replay.main([*options, "describe"]) == 2
    assert says in capsys.readouterr().err


def test_play_command_when_policies_are_compared_then_they_rotate_and_every_request_is_on_disk(monkeypatch, tmp_path):
    seen = []

    async def cold(url, workload, client, *, arrived):
        seen.append(client._fields)
        records = [record(position=position) for position in range(2)]
        for one in records:
            arrived(one)
        return records, 1.0

    monkeypatch.setattr(trace_replay, "play_cold", cold)
    result = tmp_path / "runs.jsonl"
    play_options = ["play", "--policy", "a", "--policy", "b", "--repetitions", "2", "--result", str(result)]
    assert trace_replay.main(["--trace", "skewed", *play_options]) == 0
    named = [fields["kv_hints"]["actions"][0]["payload"]["policy"] for fields in seen]
    assert named == ["a", "b", "b", "a"]
    lines = read_lines(result)
    assert [line["kind"] for line in lines] == ["request", "request", "run"] * 4
    assert lines[2]["provenance"]["hardware"] and lines[0]["class"] == "warm"


def play_watched(loads, result):
    """Play against a server that tells this of its ranks."""

    async def answer(request):
        return web.json_response({"loads": loads})

    async def serve_and_play():
        app = web.Application()
        app.router.add_get("/v1/loads", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        asked = ["--trace", "skewed", "play", "--url", f"http://127.0.0.1:{port}", "--watch-reads"]
        args = trace_replay.build_parser().parse_args([*asked, "--result", str(result)])
        try:
            return await trace_replay._play_all(args, trace_replay.workload_of(args))
        finally:
            await runner.cleanup()

    return asyncio.run(serve_and_play())


def test_play_command_when_reads_are_watched_then_the_run_says_how_long_the_queues_were(monkeypatch, tmp_path):
    async def cold(url, workload, client, *, arrived):
        await asyncio.sleep(0.2)
        return [], 1.0

    monkeypatch.setattr(trace_replay, "play_cold", cold)
    monkeypatch.setattr(trace_replay, "LOOK_PERIOD_S", 0.02)
    play_watched([{"read_queue_tokens": 48}, {"read_queue_tokens": 0}], tmp_path / "runs.jsonl")
    (run_line,) = read_lines(tmp_path / "runs.jsonl")
    queues = run_line["read_queues"]
    assert queues["num_looks"] > 1 and (queues["most_tokens"], queues["waiting_share"], queues["uneven_share"]) == (
        48,
        1,
        1,
    )


def test_play_command_when_the_server_does_not_tell_of_reads_then_nothing_is_played(monkeypatch, tmp_path):
    async def cold(*args, **kwargs):
        raise AssertionError("it has been played")

    monkeypatch.setattr(trace_replay, "play_cold", cold)
    for loads in ([], [{"num_running_reqs": 0}]):
        with pytest.raises(RuntimeError, match="--watch-reads"):
            play_watched(loads, tmp_path / "runs.jsonl")


def test_table_when_repetitions_are_shown_then_medians_in_the_order_of_servers_and_policies():
    def run_line(label, policy, ttft_s):
        figures = summary(workload_of(TraceRequest("a", 0, 0.0, 32, 4)), [record(ttft_s=ttft_s)], total_time_s=1.0)
        return {"kind": "run", "trace": "skewed", "label": label, "policy": policy, **figures}

    runs = [run_line("peer", "hybrid", 3.0), run_line("stock_rr", "as_served", 9.0)]
    runs += [run_line("peer", "lmetric", seconds) for seconds in (1.0, 2.0, 4.0)]
    rows = policy_table.table(runs).splitlines()[2:]
    assert [row.split(" | ")[1:4] for row in rows] == [
        ["stock_rr", "as_served", "1"],
        ["peer", "lmetric", "3"],
        ["peer", "hybrid", "1"],
    ]
    assert "2.00 (1.00-4.00)" in rows[1]


def test_servers_when_specified_then_each_differs_in_who_dispatches_who_fetches_and_who_has_a_store():
    folder, model = Path("build"), policy_table.DEFAULT_TARGET
    flags = {label: policy_table.server_spec(label, folder).command(model, 1) for label in policy_table.SERVERS}
    stores = {
        label: words[words.index("--banyan-store") + 1] for label, words in flags.items() if "--banyan-store" in words
    }
    assert stores == {label: f"build/{label}" for label in policy_table.STORED}
    assert "--enable-banyan" not in flags["stock_rr"] and "total_tokens" in flags["stock_tokens"]
    assert flags["index"][flags["index"].index("--banyan-share") + 1] == "index"
    assert "--banyan-share" not in flags["peer"]
