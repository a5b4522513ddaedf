# SPDX-License-Identifier: Apache-2.0
"""Spans over gRPC, from OpenTelemetry's own exporter."""

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from banyan_lab.trace.collector import Collector


@pytest.fixture
def collector():
    made = Collector("127.0.0.1:0")
    yield made
    made.close()


@pytest.fixture
def tracer(collector):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=collector.address, insecure=True)))
    yield provider.get_tracer("test")
    provider.shutdown()


def test_spans_when_their_trace_is_expected_then_kept_as_they_were_and_others_are_not(collector, tracer):
    outer = tracer.start_span("outer", start_time=1_000)
    trace = f"{outer.get_span_context().trace_id:032x}"
    collector.expect(trace)
    from opentelemetry.trace import set_span_in_context

    inner = tracer.start_span("inner", context=set_span_in_context(outer), start_time=2_000)
    inner.set_attributes({"number": 3, "text": "t", "share": 0.5, "is": True, "several": [1, 2]})
    inner.end(end_time=3_000)
    tracer.start_span("another trace").end()
    outer.end(end_time=4_000)
    first, second = collector.spans(trace)
    assert (first.name, first.start_ns, first.end_ns, first.parent) == ("inner", 2_000, 3_000, second.id)
    assert (second.name, second.parent, second.attributes) == ("outer", "", {})
    assert {**first.attributes, "several": None} == {
        "number": 3,
        "text": "t",
        "share": 0.5,
        "is": True,
        "several": None,
    }
    assert "1" in first.attributes["several"]
    assert 0 <= collector.quiet_s(trace) < 60


def test_collector_when_somebody_listens_there_then_an_error_that_names_the_place(collector):
    with pytest.raises(OSError, match=collector.address):
        Collector(collector.address)
