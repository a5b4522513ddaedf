# SPDX-License-Identifier: Apache-2.0
"""``banyan``: look at a machine, measure it. Each command is one module, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence

BENCHES = {
    "copy": ("banyan.cli.bench_copy", "page copies against one memcpy of the same bytes"),
    "dispatch": ("banyan.cli.bench_dispatch", "placing one request of 2,000 pages, hashing included"),
    "directory": ("banyan.cli.bench_directory", "lookups, leases and publications on a directory of realistic size"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process exit status."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="banyan", description="One prefix cache over all ranks of an SGLang server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say what Banyan can do on this machine, and what it would refuse")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.set_defaults(run=_doctor)
    bench = commands.add_parser("bench", help="measure the native core here")
    bench.add_argument("what", choices=sorted(BENCHES), help="; ".join(f"{k}: {v[1]}" for k, v in BENCHES.items()))
    bench.add_argument("--json", action="store_true", help="machine-readable")
    bench.set_defaults(run=_bench)
    return parser


def _bench(args: argparse.Namespace) -> int:
    module, _ = BENCHES[args.what]
    result = importlib.import_module(module).run()
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
