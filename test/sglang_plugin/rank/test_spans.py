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
from banyan.sglang_plugin.rank import requests
from banyan.sglang_plugin.rank.spans import Spans

RUNS = (Run(SourceKind.PEER, 3), Run(SourceKind.HOST, 2))
OFFER = Offer(RUNS, 1)
FETCH = Fetch("r", RUNS, 16)


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
    monkeypatch.setattr(trace, "get_global_trace_level", lambda: 1)
    return exporter.get_finished_spans


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
    spans.looked_up("r", 1_000, OFFER, 5)
    spans.looked_up("r", 2_000, OFFER, 5)
    spans.started([FETCH])
    spans.became("r", Outcome.LEASED)
    spans.became("r", Outcome.LANDED)
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
    spans.started([FETCH])
    spans.became("r", Outcome.FAILED)
    context.trace_slice_end("prefill_forward", 1)
    found = by_name(exported)
    assert found["banyan.copy"].parent.span_id == found["prefill_forward"].context.span_id
    assert found["banyan.copy"].attributes["banyan.outcome"] == "failed"
    context.trace_req_finish()


@pytest.mark.parametrize("context", [None, TraceNullContext()], ids=["another SGLang", "not traced"])
def test_spans_when_the_request_is_not_traced_then_there_are_none(exported, context):
    req = Req(context)
    requests.register(req)
    spans = Spans()
    spans.looked_up("r", 1_000, OFFER, 5)
    spans.started([FETCH])
    spans.became("r", Outcome.LANDED)
    spans.became("unknown", Outcome.LANDED)
    assert exported() == ()
