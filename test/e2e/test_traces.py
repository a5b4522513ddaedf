# SPDX-License-Identifier: Apache-2.0
"""A fetch in the trace of its request, as a collector receives it from a running server over OTLP."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from test.e2e.conftest import MOVE

from benchmark.modes import asking, models
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e
PAGE_TOKENS = 16
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that it is sent."""

    def __init__(self):
        self._spans, self._lock = [], threading.Lock()

    def Export(self, request, context):
        with self._lock:
            self._spans += [span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id):
        with self._lock:
            return [span for span in self._spans if span.trace_id.hex() == trace_id]


@pytest.fixture
def collector():
    made = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made
    server.stop(None).wait()


@pytest.fixture
def server(alone, collector, tmp_path):
    flags = ("--device", "cpu", "--max-total-tokens", "8000", "--sleep-on-idle")
    traced = ("--enable-trace", "--otlp-traces-endpoint", collector.address)
    spec = ServerSpec("traced", 2, "on", (*flags, *traced), cpu_env(dp=2))
    with ForkedServer(spec, models.ensure(models.LLAMA), tmp_path) as made:
        wait_ready([made])
        yield made


def generate(server, ids, rank, headers):
    body = {"input_ids": ids, "sampling_params": asking.GREEDY, "kv_hints": MOVE, "routed_dp_rank": rank}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["meta_info"]


def attributes(span):
    """Of OTLP's kinds of values the two that Banyan has."""
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


def test_trace_when_a_request_fetches_then_the_callers_trace_has_its_lookup_and_its_copy(server, collector):
    ids = asking.prompts()[0]
    num_tokens = (len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
    generate(server, ids, 0, {})
    fetched = generate(server, ids, 1, {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"})
    assert fetched["cached_tokens_details"]["peer"] == num_tokens
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        spans = collector.of_trace(TRACE_ID)
        named = {span.name: span for span in spans}
        if {"banyan.lookup", "banyan.copy"} <= named.keys() and any(
            span.parent_span_id.hex() == CALLER for span in spans
        ):
            break
        time.sleep(0.2)
    lookup, copy = named["banyan.lookup"], named["banyan.copy"]
    assert attributes(lookup) == {
        "banyan.found.peer_pages": num_tokens // PAGE_TOKENS,
        "banyan.planned_pages": num_tokens // PAGE_TOKENS,
    }
    assert attributes(copy) == {"banyan.peer_tokens": num_tokens, "banyan.outcome": "landed"}
    assert lookup.end_time_unix_nano <= copy.end_time_unix_nano
    # Each lies in a span of SGLang's, up to the caller's.
    parents = {span.span_id: span.parent_span_id for span in spans}
    for span in (lookup, copy):
        above = span.parent_span_id
        while above in parents:
            above = parents[above]
        assert above.hex() == CALLER
