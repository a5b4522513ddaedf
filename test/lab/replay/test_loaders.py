# SPDX-License-Identifier: Apache-2.0
"""Each format on files that the test writes."""

from __future__ import annotations

import gzip
import json

import pytest

from banyan_lab.replay import TraceError, load
from banyan_lab.replay.coding_agent import load as load_coding_agent
from banyan_lab.replay.formats import detect
from banyan_lab.replay.messages import rough_tokens


def write(folder, name, lines):
    path = folder / name
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def hashed(at_ms, num_tokens, ids):
    return {"timestamp": at_ms, "input_length": num_tokens, "output_length": 7, "hash_ids": ids}


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def session(block_tokens, num_tokens, runs):
    asked = {"t": 0.0, "in": num_tokens, "out": 3, "hash_rle": runs}
    return {"id": "x", "block_size": block_tokens, "requests": [asked]}


def test_mooncake_when_a_prompt_contains_an_earlier_one_then_it_is_its_next_turn(tmp_path):
    lines = [
        hashed(0, 1_100, [0, 1, 2]),
        hashed(500, 1_200, [0, 3, 4]),
        hashed(2_000, 1_700, [0, 1, 5, 6]),
        hashed(3_000, 1_700, [0, 1, 7, 8]),
        hashed(4_000, 2_600, [0, 1, 5, 9, 10, 11]),
    ]
    trace = load(write(tmp_path, "t.jsonl.gz", lines))
    assert [(r.session, r.turn, r.at_s) for r in trace.requests] == [
        ("s0", 0, 0.0),
        ("s1", 0, 0.5),
        ("s0", 1, 2.0),
        # Another continuation of what has been continued: a retry, or another user.
        ("s2", 0, 3.0),
        ("s0", 2, 4.0),
    ]
    assert trace.requests[2].blocks == ((0, 2), (5, 2))
    assert (trace.block_tokens, trace.span_s) == (512, 4.0)


def test_mooncake_when_prompts_share_a_first_block_only_then_they_are_sessions_of_their_own(tmp_path):
    lines = [hashed(at, 1_024, [0, 10 + at]) for at in range(5)]
    trace = load(write(tmp_path, "t.jsonl", lines))
    assert len(trace.sessions()) == 5


def test_coding_agent_when_sessions_have_subagents_then_they_share_its_scope_and_clock(tmp_path):
    def ask(t, blocks, **more):
        return {"t": t, "in": 192, "out": 3, "hash_rle": blocks, **more}

    agent = {"t": 5.0, "agent_id": "a", "requests": [ask(0.5, [[9, 1]])]}
    session = {
        "id": "x",
        "block_size": 64,
        "requests": [ask(0.0, [[1, 2]], think_time=4.0), agent, ask(8.0, [[1, 3]], think_time=2.0)],
    }
    path = write(tmp_path, "agents.jsonl", [session, {**session, "id": "y"}])
    trace = load_coding_agent(path, gap_s=100.0, seed=1)
    mine = [r for r in trace.requests if r.scope == "x"]
    assert [(r.session, r.turn, r.at_s, r.think_s) for r in mine] == [
        ("x", 0, 0.0, None),
        ("x/a", 0, 5.5, None),
        ("x", 1, 8.0, 2.0),
    ]
    assert trace.sessions()["y"][0].at_s > 0
    assert detect(path) == "coding_agent"


def test_messages_when_a_conversation_grows_then_prompts_share_their_beginning(tmp_path):
    chat = [
        {"role": "system", "content": "be kind " * 40},
        {"role": "user", "content": [{"type": "text", "text": "what is new " * 10}]},
        {"role": "assistant", "content": "nothing"},
        {"role": "user", "content": "really " * 30},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ]
    other = [chat[0], {"role": "user", "content": "something else"}, chat[2]]
    path = write(tmp_path, "chats.jsonl", [{"session_id": "a", "messages": chat}, {"id": "b", "messages": other}])
    trace = load(path)
    first, second = trace.sessions()["a"]
    third = trace.sessions()["b"][0]
    assert list(second.block_ids())[: len(list(first.block_ids()))] == list(first.block_ids())
    num_shared = sum(1 for a, b in zip(first.block_ids(), third.block_ids(), strict=False) if a == b)
    assert num_shared == len(rough_tokens("system\n" + chat[0]["content"])) // 16
    assert (first.turn, second.turn, second.think_s) == (0, 1, 1.0)


def test_messages_when_calls_were_logged_then_their_times_are_kept(tmp_path):
    calls = [
        {"timestamp": 5_000_000 + at, "input": "word " * 100, "output": "yes", "session_id": "s"} for at in (0, 250_000)
    ]
    trace = load(write(tmp_path, "calls.jsonl", calls))
    assert [(r.turn, r.at_s, r.think_s) for r in trace.requests] == [(0, 0.0, None), (1, 0.25, None)]


def test_azure_when_read_then_arrivals_and_lengths_and_nothing_shared(tmp_path):
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,0",
    ]
    trace = load(write(tmp_path, "azure.csv", lines))
    assert [(r.num_input_tokens, r.num_output_tokens, r.blocks) for r in trace.requests] == [
        (374, 44, ()),
        (396, 1, ()),
    ]
    assert trace.span_s == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("name", "lines", "says"),
    [
        ("a.jsonl", [{"neither": 1}], "name the format"),
        ("a.jsonl", ["{"], "a.jsonl:1"),
        ("a.jsonl", ["[]"], "a JSON object is wanted"),
        ("a.jsonl", [hashed(0, 1, [1]), {"hash_ids": [2]}], "a.jsonl:2: not a hash trace"),
        ("a.csv", ["TIMESTAMP,ContextTokens", "soon,1"], "a.csv:2: not a length trace"),
        ("a.jsonl", [{"messages": [{"role": "assistant"}, {}]}], "neither messages"),
        ("a.jsonl", [{"id": "x", "block_size": 64, "requests": [{}]}], "not a coding-agent session"),
        ("a.jsonl", [session(64, 128, [[1, 2]]), session(32, 128, [[1, 2]])], "a.jsonl:2.*before it was 64"),
        ("a.jsonl", [session("x", 128, [[1, 2]])], "a.jsonl:1"),
        ("a.jsonl", [session(0, 128, [[1, 2]])], "a.jsonl:1.*at least 1"),
        ("a.jsonl", [session(64, 128, [[1, 1, 1]])], "a.jsonl:1"),
        ("a.jsonl", [session(64, 128, [[1, 1.5]])], "a.jsonl:1"),
        ("a.jsonl", [session(64, 128, [[1, 3]])], "3 blocks in all.*the prompt has 2"),
        ("a.jsonl", [session(64, 128, [[1, 3], [5, -1]])], "less than none"),
        ("a.jsonl", [session(64, 128, [[0, 10**12]])], "the prompt has 2"),
        ("a.jsonl", [session(64, 10**12, [[0, 10**9]])], "at most"),
        ("a.jsonl", [hashed(0, 0, [1])], "a.jsonl:1.*at least 1"),
        ("a.jsonl", [hashed(0, -5, [])], "at least 1"),
        ("a.jsonl", [hashed(0, float("inf"), [1])], "a.jsonl:1: not a hash trace"),
        ("a.jsonl", [hashed(float("nan"), 600, [1])], "a time of nan"),
        ("a.jsonl", ["[" * 100_000], "a.jsonl:1"),
        ("a.csv", [AZURE, "2023-11-16 18:15:46,0,44"], "a.csv:2.*at least 1"),
        ("a.csv", [AZURE, "", "x" * 200_000 + ",1,1"], "a.csv:3: not a length trace: field larger"),
        ("a.csv", [AZURE, "2023-11-16 18:15:46,1,1", "1"], "a.csv:3: not a length trace"),
    ],
)
def test_load_when_a_file_is_broken_then_the_line_is_named(tmp_path, name, lines, says):
    with pytest.raises(TraceError, match=says):
        load(write(tmp_path, name, lines))


def test_load_when_the_file_is_missing_then_a_trace_error(tmp_path):
    with pytest.raises(TraceError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_load_when_a_gzipped_file_is_cut_then_a_trace_error_that_names_it(tmp_path):
    path = write(tmp_path, "t.jsonl.gz", [hashed(at, 600, [at]) for at in range(100)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="gz"):
        load(path)
