# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from benchmark.sse import DONE, EventStream, ServerSentEvent

STREAM = (
    ": keep-alive\r\n\r\n"
    'data: {"text": "né"}\n\n'
    "event: ids\ndata: [1,\ndata: 2]\n\n"
    "id: 7\nretry: 10\n\n"
    "data:no space\r\n\r\n"
    "data: [DONE]\n\n"
).encode()
EVENTS = [
    ServerSentEvent("", '{"text": "né"}'),
    ServerSentEvent("ids", "[1,\n2]"),
    ServerSentEvent("", "no space"),
    ServerSentEvent("", DONE),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_events_when_split_anywhere_then_the_same_events(size: int) -> None:
    stream = EventStream()
    events = []
    for start in range(0, len(STREAM), size):
        events.extend(stream.feed(STREAM[start : start + size]))
    assert events == EVENTS


def test_event_when_its_blank_line_is_missing_then_given_out_at_close() -> None:
    stream = EventStream()
    assert stream.feed(b'data: {"a": 1}') == []
    assert [json.loads(event.data) for event in stream.close()] == [{"a": 1}]
    assert stream.close() == []
