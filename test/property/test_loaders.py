# SPDX-License-Identifier: Apache-2.0
"""Whatever a file holds, a loader makes a trace of it that can be worked with, or raises a TraceError."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from banyan_lab.replay import Trace, TraceError, load, sharing_of
from banyan_lab.replay.formats import LOADERS
from banyan_lab.sim import dp

ASKED = {"t": 1.0, "in": 100, "out": 3, "hash_rle": [[1, 1], [7, 1]], "think_time": 2.0}
TEXT = {"role": "user", "content": [{"type": "text", "text": "a b " * 20}]}
ANSWER = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
CALL = {"timestamp": 5, "input": "word " * 40, "output": "yes", "session_id": "s"}
SESSION = {"id": "x", "block_size": 64, "requests": [ASKED, {"t": 5.0, "agent_id": "a", "requests": [ASKED]}]}
HASHED = {"timestamp": 5, "input_length": 1_100, "output_length": 7, "hash_ids": [0, 1, 2]}
LINES = {
    "mooncake": [HASHED],
    "coding_agent": [SESSION],
    "messages": [{"session_id": "a", "messages": [TEXT, ANSWER]}, CALL],
}
ROW = ["2023-11-16 18:15:46.6805900", "374", "44"]

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([500_000, 10**12, "7", "x" * 140_000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("traces") / "a trace"


def places(value: Any, *way: Any) -> Iterator[tuple[Any, ...]]:
    """The ways to each value in a value."""
    yield way
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], *way, key)


@st.composite
def changed(draw, lines: list[Any]) -> bytes:
    """Lines in JSON, of which one field or several hold something else."""
    lines = copy.deepcopy(lines)
    for _ in range(draw(st.integers(1, 2))):
        *way, last = draw(st.sampled_from([way for way in places(lines) if way]))
        holder = lines
        for key in way:
            holder = holder[key]
        holder[last] = draw(VALUES)
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def made_of(file: Path, name: str, content: bytes) -> Trace | None:
    """The trace, which a simulated node has served."""
    file.write_bytes(content)
    with suppress(TraceError):
        load(file)
    with suppress(TraceError):
        trace = LOADERS[name](file)
        assert len(sharing_of(trace).new_tokens) == len(trace.requests)
        with suppress(TraceError):
            dp.serve(trace, dp.site(block_tokens=trace.block_tokens, shares=True), "round_robin")
        return trace
    return None


@pytest.mark.parametrize("name", LINES)
@given(data=st.data())
def test_lines_when_any_field_holds_any_value_then_a_trace_or_a_trace_error(file, name, data):
    made_of(file, name, data.draw(changed(LINES[name])))


@given(row=st.lists(st.text(max_size=9) | st.sampled_from(ROW), max_size=4), quote=st.booleans())
@example(row=["2023-11-16 18:15:46+01:00", "1", "1"], quote=False)
@example(row=["x" * 140_000, "1", "1"], quote=True)
def test_rows_when_any_field_holds_any_text_then_a_trace_or_a_trace_error(file, row, quote):
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", ",".join(ROW), ('"' if quote else "") + ",".join(row)])
    made_of(file, "azure", text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("name", LOADERS)
@given(content=st.binary(max_size=60))
def test_files_when_they_hold_any_bytes_then_a_trace_or_a_trace_error(file, name, content):
    made_of(file, name, content)


@pytest.mark.parametrize("name", LINES)
@given(data=st.data())
def test_packed_files_when_cut_or_changed_then_a_trace_or_a_trace_error(file, name, data):
    whole = gzip.compress("".join(json.dumps(line) + "\n" for line in 20 * LINES[name]).encode(), mtime=0)
    packed = bytearray(whole[: data.draw(st.integers(2, len(whole)))])
    if data.draw(st.booleans()):
        packed[data.draw(st.integers(2, len(packed) - 1) if len(packed) > 2 else st.just(0))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    made_of(file, name, bytes(packed))


@pytest.mark.parametrize("name", LINES)
def test_lines_when_nothing_is_changed_then_a_trace(file, name):
    trace = made_of(file, name, "".join(json.dumps(line) + "\n" for line in LINES[name]).encode())
    assert trace is not None and trace.requests
