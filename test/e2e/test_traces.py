# SPDX-License-Identifier: Apache-2.0
"""A fetch in the trace of its request, as a collector receives it from a running server over OTLP."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest
from test.e2e.conftest import MOVE

from banyan import cli
from banyan_lab.trace.collector import Collector
from banyan_lab.trace.server import TracingServer
from banyan_lab.trace.timeline import is_whole
from benchmark.modes import asking, models
from benchmark.servers import ServerSpec, cpu_env, free_port, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]
PAGE_TOKENS = 16
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def endpoint():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(alone, endpoint, tmp_path_factory):
    """It traces nothing until it is told to, so that nobody need listen."""
    flags = ("--device", "cpu", "--max-total-tokens", "8000", "--sleep-on-idle", "--banyan-plan", "move")
    traced = ("--enable-trace", "--otlp-traces-endpoint", endpoint)
    variables = (*cpu_env(dp=2), ("SGLANG_TRACE_LEVEL", "0"))
    spec = ServerSpec("traced", 2, "on", (*flags, *traced), variables)
    with ForkedServer(spec, models.ensure(models.LLAMA), tmp_path_factory.mktemp("traced")) as made:
        wait_ready([made])
        yield made


@pytest.fixture
def collector(endpoint, server):
    made = Collector(endpoint)
    made.expect(TRACE_ID)
    TracingServer(server.url).set_trace_level(1)
    yield made
    TracingServer(server.url).set_trace_level(0)
    made.close()


def generate(server, ids, rank, headers):
    body = {"input_ids": ids, "sampling_params": asking.GREEDY, "kv_hints": MOVE, "routed_dp_rank": rank}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["meta_info"]


def test_trace_when_a_request_fetches_then_the_callers_trace_has_its_lookup_and_its_copy(server, collector):
    ids = asking.prompts()[0]
    num_tokens = (len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
    generate(server, ids, 0, {})
    fetched = generate(server, ids, 1, {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"})
    assert fetched["cached_tokens_details"]["peer"] == num_tokens
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        spans = collector.spans(TRACE_ID)
        named = {span.name: span for span in spans}
        if {"banyan.lookup", "banyan.copy"} <= named.keys() and is_whole(spans):
            break
        time.sleep(0.2)
    lookup, copy = named["banyan.lookup"], named["banyan.copy"]
    assert lookup.attributes == {
        "banyan.found.peer_pages": num_tokens // PAGE_TOKENS,
        "banyan.planned_pages": num_tokens // PAGE_TOKENS,
    }
    assert copy.attributes == {"banyan.peer_tokens": num_tokens, "banyan.outcome": "landed"}
    assert lookup.end_ns <= copy.end_ns
    # Each lies in a span of SGLang's, up to the caller's.
    parents = {span.id: span.parent for span in spans}
    for span in (lookup, copy):
        above = span.parent
        while above in parents:
            above = parents[above]
        assert above == CALLER


def test_banyan_trace_when_a_request_fetches_then_its_file_has_every_step_and_every_layer(
    server, endpoint, tmp_path, capsys, monkeypatch
):
    # Nobody knows of spans that have not come: a rank may be as late with them as a busy machine makes it.
    monkeypatch.setattr("banyan_lab.trace.command.QUIET_S", 6.0)
    monkeypatch.setattr("banyan_lab.trace.command.PATIENCE_S", 90.0)
    prompt, out = tmp_path / "prompt.txt", tmp_path / "trace.json"
    prompt.write_text("the river and the stone, the harbour and the road " * 12)
    words = ["trace", server.url, "--prompt-file", str(prompt), "--first-on", "0", "--rank", "1"]
    assert cli.main([*words, "--listen", endpoint, "--output", str(out)]) == 0, capsys.readouterr().err
    events = json.loads(out.read_text())["traceEvents"]
    tracks = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    steps = [one for one in events if one["ph"] == "X"]
    by_track = {}
    for step in steps:
        by_track.setdefault(tracks[step["tid"]], []).append(step)
    assert list(by_track) == [
        *("client", "HTTP and tokenizer", "dispatcher", "rank 1", "rank 1: copies", "rank 1: layers")
    ]
    names = {track: [step["name"] for step in some] for track, some in by_track.items()}
    assert {"request", "tokenize"} <= set(names["HTTP and tokenizer"]) and names["dispatcher"] == ["dispatch"]
    assert {"take in", "wait for its turn", "look up and plan", "prefill"} <= set(names["rank 1"])
    num_layers = len([name for name in names["rank 1: copies"] if name.startswith("land layer")])
    assert num_layers == models.COMMON["num_hidden_layers"] and "copy" in names["rank 1: copies"]
    assert len([name for name in names["rank 1: layers"] if name.startswith("compute layer")]) == num_layers - 1
    # All of it between the moment of sending and the end of the answer, on one clock.
    ended_us = max(one["ts"] + one["dur"] for one in by_track["client"])
    slack_us = 1e3
    assert all(-slack_us <= one["ts"] for one in steps)
    # The dispatcher looks at its clock when the request is on its way already.
    in_time = [step for track, some in by_track.items() if track != "dispatcher" for step in some]
    assert all(one["ts"] + one["dur"] <= ended_us + slack_us for one in in_time)
    for track in by_track.values():
        assert_nested(track)
    said = capsys.readouterr().out
    assert "first token" in said and "in the rank's own tree" in said


def assert_nested(steps):
    """As Perfetto wants them: of two steps of a track one lies in the other, or they do not meet."""
    open_ends = []
    for step in sorted(steps, key=lambda step: (step["tid"], step["ts"], -step["dur"])):
        end = step["ts"] + step["dur"]
        open_ends = [(tid, other) for tid, other in open_ends if tid == step["tid"] and other > step["ts"]]
        assert all(end <= other for _, other in open_ends)
        open_ends.append((step["tid"], end))
