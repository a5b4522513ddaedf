# SPDX-License-Identifier: Apache-2.0
"""``banyan trace``: where the time of one request goes, from HTTP to its first token, on one or several servers.

It listens as the collector that the servers send their spans to, asks each server the prompt, one after the other, and
puts what they tell side by side into a file for Perfetto.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan.cli import explain
from banyan.cli.engine import EngineError
from banyan_lab.trace.collector import Collector, Span
from banyan_lab.trace.server import TracingServer
from banyan_lab.trace.timeline import FIRST_TOKEN, Step, Tracks, chrome_trace, is_whole, took_ms, tracks_of

DEFAULT_LISTEN = "127.0.0.1:4317"
DETAIL, NOTHING = 3, 0
"""Levels of SGLang's traces: each decoded token and each layer; nobody collects, so nothing is sent."""

QUIET_S = 1.5
"""Three times what SGLang waits between two exports."""
PATIENCE_S = 30.0

SHOWN = (
    ("tokenize", "tokenize"),
    ("dispatch", "dispatch"),
    ("wait for its turn", "wait for its turn"),
    ("look up and plan", "  of that: look up and plan"),
    ("prefill", "prefill"),
    ("copy", "  beside it: copy"),
    ("wait for", "  of it: wait for layers"),
    (FIRST_TOKEN, "first token, as the client sees it"),
)
"""The steps that are printed, and in which words."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of each server.

    ``rank``: the data-parallel rank that is to answer; None: the server chooses. ``first_on``: ranks that are asked the
    same before, untraced, so that they hold it.
    """

    prompt: str
    num_tokens: int
    rank: int | None
    first_on: tuple[int, ...]

    def body(self, rank: int | None) -> dict[str, Any]:
        sampling = {"max_new_tokens": self.num_tokens, "temperature": 0, "ignore_eos": True}
        pinned = {} if rank is None else {"routed_dp_rank": rank}
        return {"text": self.prompt, "sampling_params": sampling, **pinned}


@dataclass(frozen=True, slots=True)
class Traced:
    """One request as it went: its steps, and what Banyan decided, in words; [] on a server that does not share."""

    tracks: Tracks
    decision: list[str]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="banyan trace", description=__doc__)
    parser.add_argument("url", nargs="+", help="servers, started with --enable-trace --otlp-traces-endpoint LISTEN")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT")
    what.add_argument("--prompt-file", type=Path, metavar="PATH")
    parser.add_argument("--tokens", type=int, default=4, metavar="N", help="of the answer; default %(default)s")
    parser.add_argument("--rank", type=int, metavar="N", help="which rank answers; default: the server chooses")
    parser.add_argument(
        "--first-on", type=int, action="append", default=[], metavar="N", help="ask this rank before, untraced"
    )
    parser.add_argument(
        "--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help="where the servers send to; default %(default)s"
    )
    parser.add_argument("--output", type=Path, default=Path("trace.json"), metavar="PATH", help="default %(default)s")
    parser.add_argument("--api-key-file", type=Path, metavar="PATH", help="holds the servers' key, where they have one")
    return parser


def main(argv: Sequence[str]) -> int:
    """Ask the servers, print their steps and write the file; the process exit status."""
    args = _parser().parse_args(argv)
    try:
        api_key = None if args.api_key_file is None else args.api_key_file.read_text().strip()
        prompt = args.prompt if args.prompt is not None else args.prompt_file.read_text()
        question = Question(prompt, args.tokens, args.rank, tuple(args.first_on))
        traced = trace({url: TracingServer(url, api_key=api_key) for url in args.url}, question, listen=args.listen)
        print("\n".join(told(traced)))
        # Not the command: it may have the prompt in it, and the file is passed on.
        about = {"tokens": args.tokens, "first_on": args.first_on, "rank": args.rank}
        servers = {label: one.tracks for label, one in traced.items()}
        args.output.write_text(json.dumps(chrome_trace(servers, about)))
    except (EngineError, OSError, UnicodeDecodeError) as error:
        print(f"banyan trace: {error}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"banyan trace: the server is of another release, and tells it otherwise: {error!r}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"banyan trace: {error}: pip install 'sglang[tracing]==0.5.23', as for the servers", file=sys.stderr)
        return 1
    print(f"{args.output}: open it at https://ui.perfetto.dev, or in chrome://tracing")
    return 0


def trace(engines: Mapping[str, TracingServer], question: Question, *, listen: str) -> dict[str, Traced]:
    """Ask each server, one after the other; what became of the request, by the server's URL and what it is.

    Raises:
        EngineError: for a server that cannot be asked, does not trace, or sends elsewhere.
        OSError: when somebody listens there.
        ImportError: without OpenTelemetry's packages.
    """
    infos = {url: engine.server_info() for url, engine in engines.items()}
    for url, info in infos.items():
        _check_traces(url, info, listen)
    try:
        collector = Collector(listen)
    except OSError as error:
        raise OSError(f"{error}. Is it a collector? Then it has the servers' traces already") from error
    try:
        return {_label(url, infos[url]): _traced(engine, question, collector) for url, engine in engines.items()}
    finally:
        collector.close()


def _check_traces(url: str, info: Mapping[str, Any], listen: str) -> None:
    endpoint = str(info.get("otlp_traces_endpoint"))
    if not info.get("enable_trace"):
        raise EngineError(
            f"{url} does not trace: start it with --enable-trace --otlp-traces-endpoint {listen} "
            "(and SGLANG_TRACE_LEVEL=0, so that it traces nothing until it is asked to)"
        )
    if _plain(endpoint) != _plain(listen):
        # Whoever collects there would get nothing more: the level is 0 afterwards.
        raise EngineError(f"{url} sends its traces to {endpoint}: --listen {endpoint}, or look there")


def _plain(address: str) -> str:
    return address.rpartition("//")[2].replace("localhost:", "127.0.0.1:")


def _label(url: str, info: Mapping[str, Any]) -> str:
    shares = any("banyan" in state for state in info.get("internal_states", ()))
    return f"{url} ({'Banyan' if shares else 'no sharing'})"


def _traced(engine: TracingServer, question: Question, collector: Collector) -> Traced:
    engine.set_trace_level(NOTHING)
    for rank in question.first_on:
        for _ in engine.stream(question.body(rank), {}):
            pass
    trace_id, parent = secrets.token_hex(16), secrets.token_hex(8)
    collector.expect(trace_id)
    engine.set_trace_level(DETAIL)
    try:
        steps, rid = _ask(engine, question.body(question.rank), {"traceparent": f"00-{trace_id}-{parent}-01"})
    finally:
        engine.set_trace_level(NOTHING)
    tracks = tracks_of(_collected(collector, trace_id), steps)
    return Traced(tracks, _decision(engine, rid))


def _ask(engine: TracingServer, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[list[Step], str]:
    """The request as its client sees it, and its id."""
    sent_ns, first_ns, rid, cached = time.time_ns(), 0, "", {}
    for piece in engine.stream(body, headers):
        first_ns = first_ns or time.time_ns()
        meta = piece["meta_info"]
        rid = meta["id"]
        cached = {"cached_tokens": meta["cached_tokens"], "prompt_tokens": meta["prompt_tokens"]}
    if not first_ns:
        raise EngineError("the server has ended the answer without a token")
    return [Step(FIRST_TOKEN, sent_ns, first_ns, cached), Step("the rest", first_ns, time.time_ns())], rid


def _collected(collector: Collector, trace_id: str) -> list[Span]:
    """All spans of the trace, once no more come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        spans = collector.spans(trace_id)
        if is_whole(spans) and collector.quiet_s(trace_id) > QUIET_S:
            return spans
        time.sleep(0.1)
    missing = "parts of the trace have not come" if collector.spans(trace_id) else "no span has come"
    raise EngineError(
        f"{missing} to {collector.address} within {PATIENCE_S:.0f} s: has the server the packages of "
        "sglang[tracing], and does it reach this address?"
    )


def _decision(engine: TracingServer, rid: str) -> list[str]:
    try:
        return [line for one in explain.decisions(engine, rid) for line in explain.sentences(one)]
    except EngineError:
        # It does not share, or there was nothing to look up.
        return []


def told(traced: Mapping[str, Traced]) -> list[str]:
    """A line for each step with its milliseconds on each server, and what was decided."""
    width = max(len(words) for _, words in SHOWN)
    columns = [max(12, len(label)) for label in traced]
    rows = [("milliseconds", list(traced))]
    for name, words in SHOWN:
        took = [took_ms(one.tracks, name) for one in traced.values()]
        if any(value is not None for value in took):
            rows.append((words, ["-" if value is None else f"{value:.2f}" for value in took]))
    lines = [
        "  ".join([words.ljust(width), *(cell.rjust(column) for cell, column in zip(cells, columns, strict=True))])
        for words, cells in rows
    ]
    return lines + [line for one in traced.values() for line in one.decision]
