# SPDX-License-Identifier: Apache-2.0
"""Every dispatch policy, with and without sharing, on real servers: windows of two real traces and a skewed one.

    python -m benchmark.policy_table measure --data FOLDER --server peer --repetitions 3 --result build/policies.jsonl
    python -m benchmark.policy_table show --result build/policies.jsonl

One call of `measure` is one fresh server, short enough to take turns with other work on a machine. Within it, the
caches, the store's too, are emptied before every run and the policies take turns, in an order that rotates with the
repetition. Servers: stock SGLang with either of its methods, `index` (Banyan places, nobody fetches), `peer`; these two
without the guard against hot ranks, to see what it guards against; and `store`, small pools above a drive, and
`slow_store`, a drive of 20 MB/s.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from banyan.config import POLICY_CHOICES, SGLANG_POLICY
from benchmark import trace_replay
from benchmark.compare import order_of_repetition
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.policy_classes import class_table
from benchmark.policy_draws import draws_table
from benchmark.processor import CPU_ENGINE
from benchmark.provenance import provenance
from benchmark.replay_options import SKEWED
from benchmark.results import append_lines, read_lines
from benchmark.servers import Server, ServerFailed, ServerSpec, Share, cpu_env, unwind_on_sigterm, wait_ready
from benchmark.trace_replay import AS_SERVED

POOLS_ONLY = ("--banyan-host-gb", "0")
"""The table is about placement: what a rank does not hold, a peer's pool holds or nobody."""

SMALL_ABOVE_A_STORE = (
    *("--banyan-host-gb", "0.1", "--banyan-store-admit", "first", "--banyan-store-gb", "8"),
    *("--max-total-tokens", "3500"),
)
"""What a rank does not hold is on the drive: a later turn of a session finds its prefix there."""

SERVERS: dict[str, tuple[Share, tuple[str, ...]]] = {
    "stock_rr": ("stock", ("--load-balance-method", "round_robin")),
    "stock_tokens": ("stock", ("--load-balance-method", "total_tokens")),
    "index": ("index", ()),
    "peer": ("on", POOLS_ONLY),
    "index_unguarded": ("index", ("--banyan-hot-rank-factor", "inf")),
    "peer_unguarded": ("on", (*POOLS_ONLY, "--banyan-hot-rank-factor", "inf")),
    "store": ("on", SMALL_ABOVE_A_STORE),
    "slow_store": ("on", (*SMALL_ABOVE_A_STORE, "--banyan-store-read-mb-per-s", "20")),
}
STORED = ("store", "slow_store")
POLICIES = tuple(name for name in POLICY_CHOICES if name != SGLANG_POLICY)

SEED = 1
"""Draws the sessions of TRACES; other ones tell a policy's luck with one draw from its worth."""
SEED_IN_NAME = " seed {}"

# Sized for two ranks of one thread each, where SmolLM2-135M computes some 250 prompt tokens a second on each while both
# prefill and decode: ten to thirty seconds a run. The real windows are contiguous; lengths shrink with their blocks, so
# that what is shared stays shared.
TRACES: dict[str, tuple[str, ...]] = {
    "mooncake": (
        *("--trace", "mooncake/conversation_trace.jsonl.gz", "--seed", str(SEED), "--window-seconds", "600"),
        *("--sample-ratio", "0.022", "--max-single-turn-ratio", "0.3", "--token-scale", "0.015625"),
        *("--output-scale", "0.03", "--max-output-tokens", "4", "--max-input-tokens", "2000", "--time-scale", "0.014"),
    ),
    # The same window and load with three times the sessions over three times the time: tails need more requests.
    "mooncake_long": (
        *("--trace", "mooncake/conversation_trace.jsonl.gz", "--seed", str(SEED), "--window-seconds", "600"),
        *("--sample-ratio", "0.066", "--max-single-turn-ratio", "0.3", "--token-scale", "0.015625"),
        *("--output-scale", "0.03", "--max-output-tokens", "4", "--max-input-tokens", "2000", "--time-scale", "0.042"),
    ),
    "claude_code": (
        *("--trace", "claude_code_traces/claude_code_a.jsonl.gz", "--seed", str(SEED), "--window-seconds", "240"),
        *("--window-start", "7000", "--sample-ratio", "0.08", "--token-scale", "0.015625"),
        *("--output-scale", "0.03", "--max-output-tokens", "4", "--max-input-tokens", "2000", "--time-scale", "0.04"),
    ),
    # Sessions of up to eight turns that hold more together than the pools of `store` and `slow_store`.
    "agents": (
        *("--trace", "claude_code_traces/claude_code_a.jsonl.gz", "--seed", str(SEED), "--window-seconds", "240"),
        *("--window-start", "7000", "--sample-ratio", "0.25", "--token-scale", "0.015625"),
        *("--output-scale", "0.03", "--max-output-tokens", "4", "--max-input-tokens", "2000", "--time-scale", "0.04"),
    ),
    "skewed": ("--trace", SKEWED, "--seed", str(SEED), "--num-requests", "36", "--max-output-tokens", "4"),
}


def server_spec(label: str, folder: Path) -> ServerSpec:
    """Two ranks of the CPU engine; a store lies in `folder`."""
    share, flags = SERVERS[label]
    if label in STORED:
        flags = ("--banyan-store", str(folder / label), *flags)
    return ServerSpec(
        label=label,
        dp=2,
        share=share,
        args=(
            *(*CPU_ENGINE, "--max-total-tokens", "14000", "--context-length", "4096", "--page-size", "16"),
            *("--sleep-on-idle", *flags),
        ),
        env=cpu_env(dp=2),
    )


def _measure(args: argparse.Namespace) -> int:
    out = args.result.parent
    # What an earlier server has left there would be found, and its pages are nobody's to empty.
    shutil.rmtree(out / args.server, ignore_errors=True)
    server = Server(server_spec(args.server, out), ensure_model(DEFAULT_TARGET), out / "logs")
    status = 0
    with server:
        wait_ready([server])
        _idle(server, args)
        for seed, name in product(args.seed or [SEED], args.trace or TRACES):
            # Another order for another draw, so that none always comes first.
            policies = order_of_repetition(args.policy or POLICIES, seed)
            play = ["play", "--url", server.url, "--label", args.server, "--result", str(args.result)]
            if server.spec.share != "stock":
                play += [option for policy in policies for option in ("--policy", policy)]
            if args.server in STORED:
                play.append("--watch-reads")
            times = ["--first-repetition", str(args.repetition), "--repetitions", str(args.repetitions)]
            status |= trace_replay.main([*trace_options(name, args.data, args.stretch, seed), *play, *times])
    return status


def _idle(server: Server, args: argparse.Namespace) -> None:
    """Note what the server's processes cost while nobody asks anything: shares of a core."""
    before = server.cpu_s()
    time.sleep(args.idle_seconds)
    shares = {name: (used_s - before.get(name, 0.0)) / args.idle_seconds for name, used_s in server.cpu_s().items()}
    line = {"kind": "idle", "label": args.server, "seconds": args.idle_seconds, "core_shares": shares}
    append_lines(args.result, [{**line, "provenance": provenance()}])


def trace_options(name: str, data: Path, stretch: float, seed: int = SEED) -> list[str]:
    """Options of `trace_replay` for a trace of TRACES whose file lies below `data`, at 1 / `stretch` of its pace, with
    the sessions that `seed` draws."""
    options = list(TRACES[name])
    if seed != SEED:
        name += SEED_IN_NAME.format(seed)
        options[options.index("--seed") + 1] = str(seed)
    if options[1] != SKEWED:
        options[1] = str(data / options[1])
    if stretch == 1:
        return [*options, "--name", name]
    time_scale = float(options[options.index("--time-scale") + 1]) if "--time-scale" in options else 1.0
    return [*options, "--name", f"{name} x{stretch:g}", "--time-scale", str(time_scale * stretch)]


def draw_of(name: str) -> tuple[str, int]:
    """The name that a trace has with SEED, and the seed: what `trace_options` put together."""
    found = re.search(SEED_IN_NAME.format(r"(\d+)"), name)
    return (name.replace(found[0], "", 1), int(found[1])) if found else (name, SEED)


def add_stretch_option(parser: argparse.ArgumentParser) -> None:
    """For processors on which the pace of TRACES is not what it is meant to be."""
    parser.add_argument(
        "--stretch", type=float, default=1.0, metavar="F", help="play over F times the time: for other processors"
    )


def _show(args: argparse.Namespace) -> int:
    lines = read_lines(args.result)
    runs = [line for line in lines if line.get("kind") == "run"]
    print(table(runs))
    print()
    print(class_table(grouped(runs)))
    print()
    print(draws_table([line for line in lines if line.get("kind") == "request"], draw_of))
    print()
    print(idle_table([line for line in lines if line.get("kind") == "idle"]))
    return 0


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each trace, server and policy; medians over repetitions, smallest and largest in brackets."""
    head = (
        "| trace | server | policy | n | TTFT mean s | TTFT p90 s | E2E p90 s | cached | imbalance | failed |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    rows = [_row(key, some) for key, some in grouped(runs).items()]
    return "\n".join([head, *rows])


def grouped(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Repetitions of each trace, server and policy, in the order of the tables above."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["trace"], run["label"], run["policy"]), []).append(run)

    def place(key: tuple[str, str, str]) -> tuple[int, str, int, int]:
        trace, server, policy = key
        # Variations of a trace have names of their own, see `trace_options`.
        base = trace.partition(" ")[0]
        return (
            _position(base, list(TRACES)),
            trace,
            _position(server, list(SERVERS)),
            _position(policy, [AS_SERVED, *POLICIES]),
        )

    return {key: groups[key] for key in sorted(groups, key=place)}


def _position(name: str, order: Sequence[str]) -> int:
    """Behind all others if it is not known."""
    return order.index(name) if name in order else len(order)


def _row(key: tuple[str, str, str], runs: Sequence[dict[str, Any]]) -> str:
    def spread(pick: Callable[[dict[str, Any]], float | None], digits: int) -> str:
        values = [value for run in runs if (value := pick(run)) is not None]
        if not values:
            return "-"
        return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

    cells = (
        *key,
        str(len(runs)),
        spread(lambda run: run["ttft_s"] and run["ttft_s"]["mean"], 2),
        spread(lambda run: run["ttft_s"] and run["ttft_s"]["p90"], 2),
        spread(lambda run: run["latency_s"] and run["latency_s"]["p90"], 2),
        spread(lambda run: run["cached_share"] and 100 * run["cached_share"], 1),
        spread(lambda run: run["imbalance"]["prompt_tokens"], 2),
        str(sum(run["num_errors"] for run in runs)),
    )
    return f"| {' | '.join(cells)} |"


def idle_table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: what each process of each idle server took of a core."""
    rows = ["| idle server | process | % of a core |", "|---|---|---|"]
    for line in lines:
        for process, share in sorted(line["core_shares"].items(), key=lambda item: -item[1]):
            title = process.partition(" ")[2]
            rows.append(f"| {line['label']} | {title} | {100 * share:.1f} |")
    return "\n".join(rows)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="policy_table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    measure = commands.add_parser("measure", help="one fresh server, and what is played on it")
    measure.add_argument("--data", type=Path, required=True, help="folder of the traces")
    measure.add_argument("--server", choices=list(SERVERS), required=True)
    measure.add_argument("--trace", action="append", choices=list(TRACES), help="default: all")
    measure.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    measure.add_argument("--repetition", type=int, default=1, help="number of the first one")
    measure.add_argument("--repetitions", type=int, default=1)
    measure.add_argument("--seed", type=int, action="append", help=f"which sessions are drawn; default: {SEED}")
    add_stretch_option(measure)
    measure.add_argument("--idle-seconds", type=float, default=15.0, help="watch the idle server first")
    measure.set_defaults(run=_measure)
    show = commands.add_parser("show", help="the table, and what several draws say together")
    show.set_defaults(run=_show)
    for command in (measure, show):
        command.add_argument("--result", type=Path, required=True, metavar="FILE.jsonl")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    unwind_on_sigterm()
    try:
        status: int = args.run(args)
    except (ServerFailed, ValueError) as error:
        print(f"policy_table: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
