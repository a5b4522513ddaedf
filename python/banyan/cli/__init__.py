# SPDX-License-Identifier: Apache-2.0
"""``banyan``: look at a machine, measure it. Each command is one module, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:30000"

BENCHES = {
    "copy": ("banyan.cli.bench_copy", "page copies against one memcpy of the same bytes"),
    "dispatch": ("banyan.cli.bench_dispatch", "placing one request of 2,000 pages, hashing included"),
    "gpu": ("banyan.cli.bench_gpu", "page copies, launches, waits and the host arena on a CUDA GPU"),
    "store": (
        "banyan.cli.bench_store",
        "the store against its file system and against other stores (--path)",
    ),
    "directory": ("banyan.cli.bench_directory", "lookups, leases and publications on a directory of realistic size"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["replay"]:
        # Its options are the harness's own.
        from banyan.cli import replay

        return replay.main(words[1:])
    if words[:1] == ["bench"]:
        # On a machine with a GPU and little else, only what is measured is imported.
        bench = argparse.ArgumentParser(prog="banyan bench")
        _add_bench(bench)
        return _bench(bench.parse_args(words[1:]))
    args = _parser().parse_args(words)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="banyan", description="One prefix cache over all ranks of an SGLang server.")
    from banyan.cli import sim, store
    from banyan.router import settings

    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say what Banyan can do on this machine, and what it would refuse")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.set_defaults(run=_doctor)
    store.add_parsers(commands)
    _add_bench(commands.add_parser("bench", help="measure the native core here"))
    _add_profile(commands.add_parser("profile", help="measure the prefill times of a running server"))
    route = commands.add_parser("route", help="one address for several servers, each request where its prefix is")
    settings.add_flags(route)
    route.set_defaults(run=_route)
    explain = commands.add_parser("explain", help="say why a request was fetched or computed")
    explain.add_argument("rid", help="the request's id (`meta_info.id` of its answer), or: all")
    explain.add_argument("--url", default=DEFAULT_URL, help="the server; default %(default)s")
    explain.add_argument("--json", action="store_true", help="machine-readable")
    explain.set_defaults(run=_explain)
    sim.add_parser(commands)
    commands.add_parser("replay", help="play a recorded workload against a server (in a checkout): replay --help")
    return parser


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=sorted(BENCHES), help="; ".join(f"{k}: {v[1]}" for k, v in BENCHES.items()))
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--path", help="store: the directory to measure in")


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="the server; default %(default)s")
    parser.add_argument("--output", default="profile.json", metavar="PATH", help="default %(default)s")
    parser.add_argument("--rank", type=int, default=0, help="the data-parallel rank to measure; default %(default)s")
    lengths = {"type": _lengths, "metavar": "N,N,..."}
    parser.add_argument("--extend", default=(16, 64, 256, 1024, 2048), help="new tokens of the grid", **lengths)
    parser.add_argument("--prefix", default=(0, 512, 2048, 4096), help="prefix tokens of the grid", **lengths)
    parser.add_argument("--held-out", type=int, default=12, metavar="N", help="points off the grid to test the fit on")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="times each cell is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=_profile)


def _lengths(text: str) -> tuple[int, ...]:
    """Ascending lengths, as ``16,64,256``."""
    lengths = tuple(int(part) for part in text.split(","))
    if list(lengths) != sorted(set(lengths)) or lengths[0] < 0:
        raise argparse.ArgumentTypeError(f"{text}: ascending lengths, please")
    return lengths


def _profile(args: argparse.Namespace) -> int:
    from banyan.cli import profile
    from banyan.cli.engine import Engine, EngineError

    grid = profile.Grid(args.extend, args.prefix, args.held_out, args.repeats, args.seed)
    try:
        measured = profile.measure(
            Engine(args.url), grid, rank=args.rank, provenance=profile.provenance(sys.argv), progress=print
        )
    except EngineError as error:
        print(f"banyan profile: {error}", file=sys.stderr)
        return 1
    profile.profile.save(measured, Path(args.output))
    print(f"{args.output}: {measured.cost}")
    print(f"mean error on {len(measured.held_out)} points that the fit has not seen: {measured.held_out_error:.1%}")
    return 0


def _route(args: argparse.Namespace) -> int:
    from banyan.router import settings

    try:
        chosen = settings.take_flags(args)
    except (ValueError, OSError) as error:
        print(f"banyan route: {error}", file=sys.stderr)
        return 2
    from banyan.router.run import serve

    return serve(chosen)


def _explain(args: argparse.Namespace) -> int:
    from banyan.cli import explain
    from banyan.cli.engine import Engine, EngineError

    try:
        found = explain.decisions(Engine(args.url), args.rid)
    except EngineError as error:
        print(f"banyan explain: {error}", file=sys.stderr)
        return 1
    print(
        json.dumps(found, indent=2)
        if args.json
        else "\n".join(line for one in found for line in explain.sentences(one))
    )
    return 0


def _bench(args: argparse.Namespace) -> int:
    module, _ = BENCHES[args.what]
    if (args.what == "store") != (args.path is not None):
        raise SystemExit("banyan bench: --path DIR belongs to store, which needs it")
    if args.path is not None and not os.path.isdir(args.path):
        raise SystemExit(f"banyan bench: --path {args.path}: no such folder: make one on the file system to measure")
    run = importlib.import_module(module).run
    result = run() if args.path is None else run(args.path)
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    rows = result if isinstance(result, list) else [result]
    for row in rows:
        print(
            "  ".join(
                f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()
            )
        )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from banyan.cli import doctor

    findings = doctor.examine()
    if args.json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        for finding in findings:
            print(finding)
    return 0 if all(finding.is_ok for finding in findings) else 1
