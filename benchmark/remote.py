# SPDX-License-Identifier: Apache-2.0
"""What another node's arena is worth: prefixes from there against computing them, and bytes against bare NIXL.

    python -m benchmark.remote --repeats 3
    python -m benchmark.remote --faults 20
    python -m benchmark.remote --carriers
    python -m benchmark.remote --source
    python -m benchmark.remote --nixl

Two servers of one rank each, with a compute thread each; the second one asks the first. Each repeat has prompts of its
own: the first server answers them, then each is asked once of the second server as it is (its pages are at the other
node) and once under a salt (they are nowhere), in alternating order, one at a time. Answers are compared. Beside that
the bytes of as many pages go between two processes, by Banyan's page server and by a NIXL READ in turns. Writes
build/remote/report.json, with `--faults` (`remote_faults`) faults.json, with `--carriers` (`remote_carriers`)
carriers.json, with `--source` (`remote_source`) source.json, with `--nixl` (`remote_link`, `nixl_faults`) nixl.json,
and with `--faults N --nixl` nixl_kills.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from banyan.planner import Action
from benchmark import nixl_faults, own_network, remote_carriers, remote_faults, remote_link, remote_source
from benchmark.metrics import spread
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.modes.models import WIDE, ensure
from benchmark.remote_nodes import NUM_OUTPUT_TOKENS, Nodes
from benchmark.results import write_report
from benchmark.servers import unwind_on_sigterm
from benchmark.store_server import prompts

PROMPT_TOKENS = 2000
NUM_PROMPTS = 4
NUM_DRAWN = 10_000


def measure(nodes: Nodes, asked: Sequence[list[int]], repeat: int) -> list[dict[str, Any]]:
    """Both ways for each prompt, the first one taking turns; then the tokens."""
    # The first forwards allocate: no lesson.
    nodes.borrower.generate(list(range(1000, 1400)))
    rows = []
    for number, ids in enumerate(asked):
        expected = nodes.lend(ids)
        row: dict[str, Any] = {"repeat": repeat, "prompt": number}
        for way in ("remote", "compute") if (number + repeat) % 2 else ("compute", "remote"):
            salt = f"again-{repeat}-{number}" if way == "compute" else None
            action = Action.COMPUTE if way == "compute" else None
            started_s = time.perf_counter()
            answer = nodes.borrower.generate(ids, action=action, cache_salt=salt)
            row[f"{way}_s"] = time.perf_counter() - started_s
            if way == "remote":
                row["remote_tokens"] = (answer["meta_info"]["cached_tokens_details"] or {}).get("remote", 0)
        row["is_identical"] = nodes.borrower.generate(ids, num_tokens=NUM_OUTPUT_TOKENS)["output_ids"] == expected
        rows.append(row)
    return rows


def summarise(rows: Sequence[dict[str, Any]], link: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The figures; the ratio of times to first token is that of the means of a repeat."""
    repeats = sorted({row["repeat"] for row in rows})
    ratios = []
    for repeat in repeats:
        group = [row for row in rows if row["repeat"] == repeat]
        means = [statistics.mean(row[f"{way}_s"] for row in group) for way in ("remote", "compute")]
        ratios.append(means[0] / means[1])
    return {
        "remote_ttft_ratio": spread(ratios),
        **{name: spread(values) for name, values in remote_link.figures(link).items()},
        "remote_token_share": min(row["remote_tokens"] for row in rows) / PROMPT_TOKENS,
        "outputs_identical": all(row["is_identical"] for row in rows),
        "num_compared": len(rows),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.remote", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--link-repeats", type=int, default=12)
    parser.add_argument("--faults", type=int, metavar="N", help="only: cut N pulls short by a kill, and N by a stop")
    parser.add_argument(
        "--carriers",
        action="store_true",
        help="only: the page server, a Mooncake store and a shared mount side by side",
    )
    parser.add_argument("--source", action="store_true", help="only: what lending costs the answers of the node")
    parser.add_argument(
        "--nixl", action="store_true", help="only: bytes by NIXL beside TCP, and drawn faults; with --faults: by NIXL"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/remote"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    if args.faults is not None and args.nixl:
        return _cut_nixl(args)
    if args.nixl:
        return _compare_nixl(args)
    if args.faults is not None:
        return _cut_pulls(args)
    if args.carriers:
        return _compare_carriers(args)
    if args.source:
        return _measure_source(args)
    model = ensure_model(DEFAULT_TARGET)
    link = remote_link.run(args.link_repeats)
    rows: list[dict[str, Any]] = []
    with Nodes(model, args.out) as nodes:
        for repeat in range(args.repeats):
            asked = prompts(model, [PROMPT_TOKENS] * NUM_PROMPTS, seed=args.seed + repeat)
            rows += measure(nodes, asked, repeat)
    sizes = {
        "prompt_tokens": PROMPT_TOKENS,
        "num_repeats": args.repeats,
        "link_pages": remote_link.NUM_PAGES,
        "num_link_repeats": len(link),
    }
    report = {**summarise(rows, link), "sizes": sizes}
    write_report(args.out / "report.json", {**report, "rows": rows, "link": link}, args)
    # What docs/benchmarks/remote.json is a copy of.
    write_report(args.out / "figures.json", report, args)
    print(json.dumps(report, indent=2), flush=True)
    # Without InfiniBand, NIXL's library faults when it is unloaded.
    os._exit(0 if report["outputs_identical"] else 1)


def _cut_pulls(args: argparse.Namespace) -> int:
    """Write what the faults came to."""
    os._exit(_tell_cut(args, remote_faults.measure(ensure(WIDE), args.out, args.faults, args.seed), "faults"))


def _cut_nixl(args: argparse.Namespace) -> int:
    """The same by NIXL, in a network of its own."""
    if not args.inside:
        options = ["--faults", str(args.faults), "--nixl", "--inside", "--seed", str(args.seed), "--out", str(args.out)]
        return own_network.run_inside("benchmark.remote", options)
    return _tell_cut(args, remote_faults.measure_nixl(ensure(WIDE), args.out, args.faults, args.seed), "nixl_kills")


def _tell_cut(args: argparse.Namespace, report: dict[str, Any], name: str) -> int:
    """Write and show it; how the program ends."""
    write_report(args.out / f"{name}.json", report, args)
    figures = {key: value for key, value in report.items() if key not in ("rows", "controls")}
    # What docs/benchmarks/remote_faults.json and remote_nixl_kills.json are copies of.
    write_report(args.out / f"{name}_figures.json", figures, args)
    print(json.dumps(figures, indent=2), flush=True)
    is_right = report["outputs_identical"] and all(report[how]["is_in_time"] for how in remote_faults.FAULTS)
    return 0 if is_right else 1


def _compare_nixl(args: argparse.Namespace) -> int:
    """Write what NIXL won or lost against TCP, and what drawn faults came to."""
    rows = {name: remote_link.run(args.link_repeats, env) for name, env in remote_link.ENVS.items()}
    drawn = nixl_faults.run(NUM_DRAWN, args.seed)
    figures = {
        **{
            name: {figure: spread(values) for figure, values in remote_link.nixl_figures(mine).items()}
            for name, mine in rows.items()
        },
        "num_drawn_faults": drawn["num_pulls"],
        "num_wrong": drawn["num_wrong"],
        "sizes": {"link_pages": remote_link.NUM_PAGES, "num_link_repeats": args.link_repeats},
    }
    write_report(args.out / "nixl.json", {**figures, "rows": rows, "drawn": drawn}, args)
    # What docs/benchmarks/remote_nixl.json is a copy of.
    write_report(args.out / "nixl_figures.json", figures, args)
    print(json.dumps(figures, indent=2), flush=True)
    return 0


def _compare_carriers(args: argparse.Namespace) -> int:
    """Write what the carriers came to."""
    report = remote_carriers.measure(ensure_model(DEFAULT_TARGET), args.out, args.repeats, args.seed)
    write_report(args.out / "carriers.json", report, args)
    figures = {name: value for name, value in report.items() if not name.endswith("rows")}
    # What docs/benchmarks/remote_carriers.json is a copy of.
    write_report(args.out / "carriers_figures.json", figures, args)
    print(json.dumps(figures, indent=2), flush=True)
    return 0 if report["outputs_identical"] else 1


def _measure_source(args: argparse.Namespace) -> int:
    """Write what lending costs."""
    found = remote_source.measure(args.out, args.seed)
    # What docs/benchmarks/remote_source.json is a copy of.
    write_report(args.out / "source.json", found, args)
    print(json.dumps({name: value for name, value in found.items() if name != "rows"}, indent=2), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
