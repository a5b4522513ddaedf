# SPDX-License-Identifier: Apache-2.0
"""`banyan trace` against servers that send their spans over gRPC, as SGLang does."""

import json

import pytest
from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import set_span_in_context

from banyan import cli
from banyan.cli.engine import EngineError
from banyan_lab.trace import command

LISTEN = "127.0.0.1:24317"


class FakeServer:
    """An engine that traces what it is asked while its level is above 0."""

    def __init__(self, shares, **info):
        self._info = {"enable_trace": True, "otlp_traces_endpoint": LISTEN, **info}
        self._info["internal_states"] = [{"banyan": {"dp_rank": 0, "plans": []}}] if shares else [{}]
        self.level, self.asked = 3, []

    def server_info(self):
        return self._info

    def set_trace_level(self, level):
        self.level = level

    def ranks(self):
        raise EngineError("runs without sharing")

    def stream(self, body, headers):
        self.asked.append((body, self.level))
        if self.level:
            self._send_spans(propagate.extract(headers))
        meta = {"id": "rid", "cached_tokens": 3, "prompt_tokens": 9}
        yield {"text": "a", "meta_info": meta}
        yield {"text": "ab", "meta_info": meta}

    def _send_spans(self, caller):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=LISTEN, insecure=True)))
        tracer = provider.get_tracer("server")
        root = tracer.start_span("Req", context=caller, attributes={"rid": "rid"})
        labels = {"thread_label": "Scheduler", "dp_rank": 1}
        thread = tracer.start_span("thread", context=set_span_in_context(root), attributes=labels)
        tracer.start_span("prefill_forward", context=set_span_in_context(thread)).end()
        thread.end()
        root.end()
        provider.shutdown()


@pytest.fixture
def servers(monkeypatch):
    made = {"http://on": FakeServer(shares=True), "http://off": FakeServer(shares=False)}
    monkeypatch.setattr(command, "TracingServer", lambda url, **_: made[url])
    monkeypatch.setattr(command, "QUIET_S", 0.05)
    return made


def test_trace_when_two_servers_are_asked_then_one_file_has_both_and_nothing_is_traced_any_more(
    servers, tmp_path, capsys
):
    out = tmp_path / "t.json"
    words = [
        "trace",
        *servers,
        "--prompt",
        "x",
        "--first-on",
        "0",
        "--rank",
        "1",
        "--listen",
        LISTEN,
        "--output",
        str(out),
    ]
    assert cli.main(words) == 0
    events = json.loads(out.read_text())["traceEvents"]
    labels = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert labels == ["http://on (Banyan)", "http://off (no sharing)"]
    assert {one["pid"] for one in events if one["name"] == "prefill"} == {1, 2}
    for server in servers.values():
        (first, untraced), (second, traced) = server.asked
        assert (first["routed_dp_rank"], untraced, second["routed_dp_rank"], traced) == (0, 0, 1, 3)
        assert server.level == 0
    said = capsys.readouterr().out
    assert "prefill" in said and "first token" in said and str(out) in said


def test_trace_when_its_file_is_passed_on_then_the_prompt_is_not_in_it(servers, tmp_path, monkeypatch):
    out = tmp_path / "t.json"
    words = ["trace", "http://on", "--prompt", "my secret", "--listen", LISTEN, "--output", str(out)]
    monkeypatch.setattr("sys.argv", ["banyan", *words])
    assert cli.main(words) == 0
    assert "secret" not in out.read_text() and json.loads(out.read_text())["otherData"]["tokens"] == 4


def test_trace_when_its_file_cannot_be_written_then_the_steps_are_told_all_the_same(servers, tmp_path, capsys):
    words = ["trace", "http://on", "--prompt", "x", "--listen", LISTEN, "--output", str(tmp_path)]
    assert cli.main(words) == 1
    said = capsys.readouterr()
    assert "prefill" in said.out and str(tmp_path) in said.err


def test_trace_when_a_file_or_an_answer_is_none_then_one_line_says_so(servers, tmp_path, monkeypatch, capsys):
    broken = tmp_path / "broken"
    broken.write_bytes(b"\xff")
    assert cli.main(["trace", "http://on", "--prompt-file", str(broken), "--listen", LISTEN]) == 1
    monkeypatch.setattr(FakeServer, "stream", lambda *_: iter([{"text": "a"}]))
    assert cli.main(["trace", "http://on", "--prompt", "x", "--listen", LISTEN]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "can't decode" in first and "of another release" in second


@pytest.mark.parametrize(
    ("info", "way_out"),
    [
        ({"enable_trace": False}, "--enable-trace --otlp-traces-endpoint"),
        ({"otlp_traces_endpoint": "otel:9999"}, "--listen otel:9999"),
        ({"otlp_traces_endpoint": "otel:24317"}, "--listen otel:24317"),
    ],
)
def test_trace_when_a_server_sends_nothing_here_then_refused_with_the_way_out(servers, info, way_out, capsys):
    servers["http://off"] = FakeServer(shares=False, **info)
    assert cli.main(["trace", *servers, "--prompt", "x", "--listen", LISTEN]) == 1
    said = capsys.readouterr().err
    assert way_out in said and "http://off" in said
    assert not servers["http://on"].asked


def test_trace_when_the_address_is_spelled_otherwise_then_it_is_the_same(servers, tmp_path):
    servers["http://on"] = FakeServer(shares=True, otlp_traces_endpoint=LISTEN.replace("127.0.0.1", "http://localhost"))
    words = ["trace", "http://on", "--prompt", "x", "--listen", LISTEN, "--output", str(tmp_path / "t.json")]
    assert cli.main(words) == 0


def test_trace_when_no_span_comes_then_an_error_and_the_level_is_0_again(servers, monkeypatch, capsys):
    monkeypatch.setattr(command, "PATIENCE_S", 0.3)
    monkeypatch.setattr(FakeServer, "_send_spans", lambda self, caller: None)
    assert cli.main(["trace", "http://on", "--prompt", "x", "--listen", LISTEN]) == 1
    assert "no span has come" in capsys.readouterr().err and servers["http://on"].level == 0


def test_trace_when_somebody_listens_there_then_said(servers, capsys):
    taken = command.Collector(LISTEN)
    try:
        assert cli.main(["trace", "http://on", "--prompt", "x", "--listen", LISTEN]) == 1
    finally:
        taken.close()
    assert "a collector?" in capsys.readouterr().err
