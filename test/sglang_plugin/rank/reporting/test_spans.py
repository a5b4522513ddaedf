# SPDX-License-Identifier: Apache-2.0
"""A fetch in SGLang's own trace, with OpenTelemetry's SDK collecting the spans."""

from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sglang.srt.observability import trace
from sglang.srt.observability.trace import TraceNullContext, TraceReqContext

from banyan.core import Fetch, Offer, Outcome, Run, SourceKind
from banyan.routing.hint import Decision
from banyan.sglang_plugin.rank import requests
from banyan.sglang_plugin.rank.reporting.spans import Spans, placed

RUNS = (Run(SourceKind.PEER, 3), Run(SourceKind.HOST, 2))
OFFER = Offer(RUNS, 1)
MS = 1_000_000


class Req:
    """A request as SGLang's scheduler has it, traced or not."""

    def __init__(self, context):
        self.rid = "r"
        self.time_stats = SimpleNamespace(trace_ctx=context)


@pytest.fixture
def exported(monkeypatch):
    """The spans that have ended. SGLang would send them to a collector; the rest is its own."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=trace.TraceCustomIdGenerator())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "tracer", provider.get_tracer("sglang server"))
    monkeypatch.setattr(trace, "opentelemetry_initialized", True)
    monkeypatch.setattr(trace, "get_global_trace_level", lambda: 3)
    return exporter.get_finished_spans


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(ms=0)
    monkeypatch.setattr("banyan.sglang_plugin.rank.reporting.spans.time.time_ns", lambda: made.ms * MS)
    return made


@pytest.fixture
def req(exported):
    context = TraceReqContext("r", module_name="request")
    context.trace_req_start()
    made = Req(context)
    requests.register(made)
    return made


def by_name(exported):
    return {span.name: span for span in exported()}


def test_spans_when_a_fetch_lands_then_lookup_and_copy_are_children_in_the_requests_trace(exported, req):
    spans = Spans()
    spans.looked_up(requests.id_of_rid("r"), 1_000, OFFER, 5)
    spans.looked_up(requests.id_of_rid("r"), 2_000, OFFER, 5)
    spans.started([Fetch(requests.id_of_rid("r"), RUNS, 16)], [])
    spans.became(requests.id_of_rid("r"), Outcome.LEASED)
    spans.became(requests.id_of_rid("r"), Outcome.LANDED)
    req.time_stats.trace_ctx.trace_req_finish()
    found = by_name(exported)
    root = next(span for span in exported() if span.parent is None)
    thread = next(span for span in exported() if span.parent and span.parent.span_id == root.context.span_id)
    lookup, copy = found["banyan.lookup"], found["banyan.copy"]
    for span in (lookup, copy):
        assert span.context.trace_id == root.context.trace_id and span.parent.span_id == thread.context.span_id
    assert [span.name for span in exported()].count("banyan.lookup") == 1 and lookup.start_time == 1_000
    assert dict(lookup.attributes) == {
        "banyan.found.peer_pages": 3,
        "banyan.found.host_pages": 2,
        "banyan.planned_pages": 5,
    }
    assert dict(copy.attributes) == {
        "banyan.peer_tokens": 48,
        "banyan.host_tokens": 32,
        "banyan.outcome": "landed",
    }
    assert [event.name for event in copy.events] == ["landed"] and copy.start_time <= copy.end_time


def test_spans_when_a_forward_of_sglang_is_open_then_the_copy_lies_in_it(exported, req):
    spans, context = Spans(), req.time_stats.trace_ctx
    context.trace_slice_start("prefill_forward", 1)
    spans.started([Fetch(requests.id_of_rid("r"), RUNS, 16)], [])
    spans.became(requests.id_of_rid("r"), Outcome.FAILED)
    context.trace_slice_end("prefill_forward", 1)
    found = by_name(exported)
    assert found["banyan.copy"].parent.span_id == found["prefill_forward"].context.span_id
    assert found["banyan.copy"].attributes["banyan.outcome"] == "failed"
    context.trace_req_finish()


def of_layers(exported, name):
    """Start and end of each layer's span, in milliseconds of the test's clock."""
    found = sorted((span for span in exported() if span.name == name), key=lambda span: span.attributes["banyan.layer"])
    return [(span.attributes["banyan.layer"], span.start_time / MS, span.end_time / MS) for span in found]


def test_spans_when_a_copy_knows_its_layers_then_each_lands_behind_the_one_before_it(exported, req, clock):
    spans = Spans()
    clock.ms = 100
    spans.started([Fetch(requests.id_of_rid("r"), RUNS, 16)], [req])
    clock.ms = 103
    spans.forward_begins(SimpleNamespace(ages_s=lambda: [0.018, 0.015, 0.010]), 2)
    clock.ms = 120
    spans.became(requests.id_of_rid("r"), Outcome.LANDED)
    assert of_layers(exported, "banyan.landing") == [(0, 102, 105), (1, 105, 110)]
    copy = by_name(exported)["banyan.copy"]
    assert (copy.start_time / MS, copy.end_time / MS) == (100, 110)


def test_spans_when_a_forward_is_traced_then_its_layers_and_what_they_waited_for(exported, req, clock):
    spans = Spans()
    spans.started([], [req])
    forward = spans.forward_begins(None, 3)
    for now_ms, layer, waited_s in ((10, 0, 0.004), (11, 0, 0.0), (20, 1, 0.0), (32, 2, 0.002), (33, 2, 0.0)):
        clock.ms = now_ms
        forward.reads(layer, waited_s)
    assert of_layers(exported, "banyan.layer") == [(0, 10, 20), (1, 20, 30)]
    assert of_layers(exported, "banyan.wait") == [(0, 6, 10), (2, 30, 32)]
    # The decode step behind it is nobody's.
    assert spans.forward_begins(None, 3) is None


def test_spans_when_sglang_shows_steps_only_then_no_layers(exported, req, monkeypatch):
    req.time_stats.trace_ctx.trace_level = 1
    spans = Spans()
    spans.started([Fetch(requests.id_of_rid("r"), RUNS, 16)], [req])
    forward = spans.forward_begins(SimpleNamespace(ages_s=lambda: [0.02, 0.01]), 2)
    forward.reads(0, 0.001)
    forward.reads(1, 0.001)
    spans.became(requests.id_of_rid("r"), Outcome.LANDED)
    assert [span.name for span in exported()] == ["banyan.copy"]


def test_placed_when_the_dispatcher_has_chosen_then_why_and_when_the_client_has_then_nothing(exported, req):
    req.dp_max_kv_len = 48
    placed(req, None)
    placed(req, Decision("lmetric", "cache", 1, 60, held_us=7))
    (told,) = exported()
    assert told.name == "banyan.placed" and dict(told.attributes) == {
        "banyan.policy": "lmetric",
        "banyan.reason": "cache",
        "banyan.hot_ranks": 1,
        "banyan.dispatch_us": 60,
        "banyan.held_us": 7,
        "banyan.seen_elsewhere_tokens": 48,
    }


@pytest.mark.parametrize("context", [None, TraceNullContext()], ids=["another SGLang", "not traced"])
def test_spans_when_the_request_is_not_traced_then_there_are_none(exported, context):
    req = Req(context)
    requests.register(req)
    spans = Spans()
    spans.looked_up(requests.id_of_rid("r"), 1_000, OFFER, 5)
    placed(req, Decision("lmetric", "cache", 1, 60))
    spans.started([Fetch(requests.id_of_rid("r"), RUNS, 16)], [req])
    assert spans.forward_begins(None, 2) is None
    spans.became(requests.id_of_rid("r"), Outcome.LANDED)
    spans.became("unknown", Outcome.LANDED)
    assert exported() == ()
