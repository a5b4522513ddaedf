# SPDX-License-Identifier: Apache-2.0
"""Takes the spans that servers send with ``--otlp-traces-endpoint``, as a collector of OpenTelemetry does.

States: listening -> closed. Calls come from threads of gRPC, which only add spans; any thread may ask.
"""

from __future__ import annotations

import threading
import time
from concurrent import futures
from dataclasses import dataclass
from typing import Any

NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class Span:
    """One span of a trace. Ids are hexadecimal; ``parent`` is "" where there is none. Times are those of the wall clock
    of the node that sent it, in nanoseconds."""

    name: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


class Collector:
    """Keeps the spans of the traces that it is told to; all others are dropped."""

    def __init__(self, address: str) -> None:
        """Listen at ``HOST:PORT``; port 0 takes any.

        Raises:
            ImportError: without the packages that a traced server needs as well.
            OSError: when somebody listens there.
        """
        import grpc
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

        self._traces: dict[str, list[Span]] = {}
        self._heard_s: dict[str, float] = {}
        self._lock = threading.Lock()
        # Without it two may listen at one port, and each gets a part.
        self._server = grpc.server(futures.ThreadPoolExecutor(NUM_THREADS), options=(("grpc.so_reuseport", 0),))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen at {address}: {error}") from error
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        """What a server sends."""
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        sent = [span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans]
        with self._lock:
            for span in sent:
                trace = span.trace_id.hex()
                if trace in self._traces:
                    self._traces[trace].append(_plain(span))
                    self._heard_s[trace] = time.monotonic()
        return trace_service_pb2.ExportTraceServiceResponse()

    def expect(self, trace: str) -> None:
        """From now on keep the spans of this trace; ``trace`` is its id."""
        with self._lock:
            self._traces.setdefault(trace, [])
            self._heard_s[trace] = time.monotonic()

    def spans(self, trace: str) -> list[Span]:
        """Those of an expected trace that have come so far."""
        with self._lock:
            return list(self._traces[trace])

    def quiet_s(self, trace: str) -> float:
        """Seconds since the last span of an expected trace has come, or since it is expected."""
        with self._lock:
            return time.monotonic() - self._heard_s[trace]

    def close(self) -> None:
        self._server.stop(None).wait()


def _plain(span: Any) -> Span:
    values = {one.key: _value(one.value) for one in span.attributes}
    return Span(
        span.name,
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        values,
    )


def _value(value: Any) -> Any:
    """Numbers, texts and truths as they are; what is made of several as text."""
    kind = value.WhichOneof("value")
    if kind in ("string_value", "bool_value", "int_value", "double_value"):
        return getattr(value, kind)
    return str(value).strip()
