# SPDX-License-Identifier: Apache-2.0
"""One request from HTTP to its first token, with sharing and without, as `banyan trace` sees it: the file for Perfetto
and the picture in the documentation.

    python -m benchmark.request_trace --picture docs/pictures/request.svg

Two servers with two ranks each. Rank 0 is asked a prompt; then rank 1 is asked the same, and that is traced.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from banyan_lab.trace import command as trace
from banyan_lab.trace.server import TracingServer
from banyan_lab.trace.timeline import FIRST_TOKEN, chrome_trace
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.processor import CPU_ENGINE
from benchmark.provenance import provenance
from benchmark.servers import ServerSpec, Share, cpu_env, free_port, unwind_on_sigterm, wait_ready
from benchmark.warm import ForkedServer

KINDS: tuple[Share, ...] = ("on", "off")
FLAGS = (*CPU_ENGINE, "--max-total-tokens", "12000", "--context-length", "4096", "--sleep-on-idle")
WORDS = "river stone harbour road hill market weather boat school house garden winter letter window morning".split()
COLOURS = {"prefill": "#5a7fb5", "copies": "#2f6f4f", "layers": "#8d6bb0", "first token": "#c9c4ba"}
PLAIN = "#9a9a9a"
EDGED_MS = 1.0


def prompt_of(num_words: int, seed: int) -> str:
    """About as many tokens."""
    drawn = random.Random(seed)
    return " ".join(drawn.choice(WORDS) for _ in range(num_words))


def run(args: argparse.Namespace) -> dict[str, trace.Traced]:
    """Both servers, one beside the other; the second of two prompts, so that nothing is done for the first time."""
    listen = f"127.0.0.1:{free_port()}"
    flags = (*FLAGS, "--enable-trace", "--otlp-traces-endpoint", listen)
    variables = (*cpu_env(dp=2), ("SGLANG_TRACE_LEVEL", "0"))
    servers = [ForkedServer(ServerSpec(kind, 2, kind, flags, variables), args.model, args.out) for kind in KINDS]
    try:
        wait_ready(servers)
        engines = {server.spec.label: TracingServer(server.url) for server in servers}
        for seed in range(2):
            question = trace.Question(prompt_of(args.words, seed), num_tokens=2, rank=1, first_on=(0,))
            traced = trace.trace(engines, question, listen=listen)
        return traced
    finally:
        for server in servers:
            server.stop()


def draw(events: Sequence[dict[str, Any]], path: Path) -> None:
    """The events of a file for Perfetto as an SVG: for each server a panel with a scale of its own, a row for each
    track."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.fonttype"], pyplot.rcParams["svg.hashsalt"] = "none", "banyan"
    named = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    servers = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    rows = [sum(pid == server for pid, _ in named) for server in servers]
    figure, panels = pyplot.subplots(
        len(servers), 1, figsize=(9, 1.6 + 0.32 * sum(rows)), squeeze=False, height_ratios=rows
    )
    for axes, (pid, label) in zip(panels[:, 0], servers.items(), strict=True):
        tids = [tid for server, tid in named if server == pid]
        for one in events:
            if one["ph"] == "X" and one["pid"] == pid:
                _bar(axes, tids.index(one["tid"]), one, named[pid, one["tid"]])
        axes.set_yticks(range(len(tids)), [named[pid, tid] for tid in tids], fontsize=8)
        axes.invert_yaxis()
        axes.tick_params(axis="x", labelsize=8)
        first_ms = next(one["dur"] for one in events if one["pid"] == pid and one["name"] == FIRST_TOKEN) / 1e3
        axes.set_title(f"{label}: first token after {first_ms:.0f} ms", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("milliseconds since the client began to send", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _bar(axes: Any, row: int, event: dict[str, Any], title: str) -> None:
    colour = COLOURS.get(event["name"], COLOURS.get(title.rpartition(": ")[2], PLAIN))
    start_ms, took_ms = event["ts"] / 1e3, event["dur"] / 1e3
    # Steps side by side are told apart by their edges; one that is hardly there must not vanish behind them.
    edge = "white" if took_ms > EDGED_MS else colour
    axes.broken_barh([(start_ms, took_ms)], (row - 0.35, 0.7), facecolor=colour, edgecolor=edge, linewidth=0.4)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.request_trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--words", type=int, default=1000, help="of the prompt")
    parser.add_argument("--model", type=Path, default=DEFAULT_TARGET, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("build/request_trace"))
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    args.out.mkdir(parents=True, exist_ok=True)
    args.model = ensure_model(args.model)
    traced = run(args)
    file = chrome_trace({label: one.tracks for label, one in traced.items()}, {"provenance": provenance()})
    (args.out / "trace.json").write_text(json.dumps(file))
    print("\n".join(trace.told(traced)))
    if args.picture is not None:
        draw(file["traceEvents"], args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
