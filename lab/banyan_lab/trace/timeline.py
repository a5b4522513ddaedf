# SPDX-License-Identifier: Apache-2.0
"""One request on several servers, side by side: from the spans of a trace to tracks of steps, and to the JSON that
Perfetto and chrome://tracing load. Pure.

Invariants
  1. Times are microseconds since the client began to send, on each server by itself. Each process tells them by its own
     clock, so those of another node than the client's are off by the difference of the clocks.
  2. On one track two steps are disjoint, or one lies within the other: what overlaps in another way is put into a track
     of its own. Perfetto drops what is not nested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from banyan_lab.trace.collector import Span

CLIENT, HTTP, DISPATCHER = "client", "HTTP and tokenizer", "dispatcher"
FIRST_TOKEN = "first token"

TITLES = {"Tokenizer": HTTP, "DP Controller": DISPATCHER, "Scheduler": "rank"}
"""Of SGLang's threads, by what the label ends with that each gives itself."""

STEPS = {
    "tokenize": "tokenize",
    "api_server_dispatch": "send to the dispatcher",
    "dpc_dispatch": "dispatch",
    "request_process": "take in",
    "prefill_waiting": "wait for its turn",
    "prefill_forward": "prefill",
    "chunked_prefill": "a chunk of the prefill",
    "decode_forward": "decode",
    "decode_loop": "decode one token",
    "banyan.placed": "placed",
    "banyan.lookup": "look up and plan",
    "banyan.copy": "copy",
    "banyan.landing": "land",
    "banyan.wait": "wait for",
    "banyan.layer": "compute",
}
"""What steps are called; any other has the name of its span."""

OWN_TRACKS = {"banyan.copy": "copies", "banyan.landing": "copies", "banyan.wait": "layers", "banyan.layer": "layers"}
"""These go on beside the other steps of their rank."""

DECISION = "banyan.placed"
LAYER = "banyan.layer"


@dataclass(frozen=True, slots=True)
class Step:
    """Something that took time, or a moment (``end_ns`` is ``start_ns``)."""

    name: str
    start_ns: int
    end_ns: int
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def took_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


Tracks = dict[str, list[Step]]
"""The steps of one request, by the title of their track, in the order in which they are shown."""


def tracks_of(spans: Sequence[Span], client: Sequence[Step]) -> Tracks:
    """The request as its client saw it, and as the server's processes did."""
    by_id = {span.id: span for span in spans}
    found: Tracks = {CLIENT: list(client), HTTP: [], DISPATCHER: []}
    decision: dict[str, Any] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        if span.name == DECISION:
            decision = _told(span)
        elif _is_request(span):
            found[HTTP].append(Step("request", span.start_ns, span.end_ns, _told(span)))
        elif not _is_thread(span):
            title = _title(span, by_id)
            found.setdefault(title, []).append(Step(_name(span), span.start_ns, span.end_ns, _told(span)))
    found[DISPATCHER] = [
        Step(one.name, one.start_ns, one.end_ns, {**one.told, **decision}) for one in found[DISPATCHER]
    ]
    return {title: steps for title, steps in found.items() if steps}


def is_whole(spans: Sequence[Span]) -> bool:
    """Whether the request has ended, and every span's parent has come: what ends later than its parts is sent later."""
    ids = {span.id for span in spans}
    return any(map(_is_request, spans)) and all(span.parent in ids for span in spans if not _is_request(span))


def _is_request(span: Span) -> bool:
    return "rid" in span.attributes


def _is_thread(span: Span) -> bool:
    return "thread_label" in span.attributes


def _title(span: Span, by_id: Mapping[str, Span]) -> str:
    above = span
    # No further up than there are spans: who sends them may say that one is its own ancestor.
    for _ in by_id:
        if _is_thread(above) or above.parent not in by_id:
            break
        above = by_id[above.parent]
    label = str(above.attributes.get("thread_label", "other"))
    title = next((title for end, title in TITLES.items() if label.endswith(end)), label)
    if "dp_rank" in above.attributes:
        title += f" {above.attributes['dp_rank']}"
    if above.attributes.get("tp_rank"):
        title += f", shard {above.attributes['tp_rank']}"
    own = OWN_TRACKS.get(span.name)
    return title if own is None else f"{title}: {own}"


def _name(span: Span) -> str:
    name = STEPS.get(span.name, span.name)
    return name if LAYER not in span.attributes else f"{name} layer {span.attributes[LAYER]}"


def _told(span: Span) -> dict[str, Any]:
    return {key.removeprefix("banyan."): value for key, value in span.attributes.items()}


def took_ms(tracks: Tracks, name: str) -> float | None:
    """What all steps of that name took together, of all layers if it is of a layer; None where there is none. Shards
    take them beside each other, each on its track: it is what the slowest one took."""
    named = (
        [step for step in steps if step.name == name or step.name.startswith(f"{name} layer ")]
        for steps in tracks.values()
    )
    return max((sum(step.took_ms for step in steps) for steps in named if steps), default=None)


def chrome_trace(servers: Mapping[str, Tracks], about: Mapping[str, Any]) -> dict[str, Any]:
    """The file for Perfetto: a process for each server, by its label. ``about`` is kept beside the events."""
    events: list[dict[str, Any]] = []
    for pid, (label, tracks) in enumerate(servers.items(), start=1):
        zero_ns = min(step.start_ns for step in tracks[CLIENT])
        events += [_meta(pid, "process_name", {"name": label}), _meta(pid, "process_sort_index", {"sort_index": pid})]
        tid = 0
        for title, steps in tracks.items():
            for lane in _lanes(steps):
                tid += 1
                events += [
                    _meta(pid, "thread_name", {"name": title}, tid),
                    _meta(pid, "thread_sort_index", {"sort_index": tid}, tid),
                ]
                events += [{**_event(step, zero_ns), "pid": pid, "tid": tid} for step in lane]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _meta(pid: int, name: str, args: dict[str, Any], tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _event(step: Step, zero_ns: int) -> dict[str, Any]:
    # Whole microseconds: fractions do not add up to the same end for a step and for the one around it.
    start_us, end_us = (step.start_ns - zero_ns) // 1000, (step.end_ns - zero_ns) // 1000
    common = {"name": step.name, "cat": "request", "ts": start_us, "args": dict(step.told)}
    if step.end_ns == step.start_ns:
        return {**common, "ph": "i", "s": "t"}
    return {**common, "ph": "X", "dur": end_us - start_us}


def _lanes(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """The steps, divided so that those of one lane are nested."""
    rest = sorted(steps, key=lambda step: (step.start_ns, -step.end_ns))
    while rest:
        lane: list[Step] = []
        left: list[Step] = []
        open_ends: list[int] = []
        for step in rest:
            while open_ends and open_ends[-1] <= step.start_ns:
                open_ends.pop()
            if open_ends and step.end_ns > open_ends[-1]:
                left.append(step)
                continue
            open_ends.append(step.end_ns)
            lane.append(step)
        yield lane
        rest = left
