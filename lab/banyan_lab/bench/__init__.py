# SPDX-License-Identifier: Apache-2.0
"""``banyan bench``: measure the native core here. On a machine with a GPU and little else, only what is measured is
imported."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

BENCHES = {
    "copy": ("banyan_lab.bench.copy", "page copies against one memcpy of the same bytes"),
    "dispatch": ("banyan_lab.bench.dispatch", "placing one request of 2,000 pages, hashing included"),
    "evict": ("banyan_lab.bench.evict", "choosing the pages that leave a full pool"),
    "gpu": ("banyan_lab.bench.gpu", "page copies, launches, waits and the host arena on a CUDA GPU"),
    "hooks": ("banyan_lab.bench.hooks", "what each hook takes in a running server, in ten seconds (--url)"),
    "store": ("banyan_lab.bench.store", "the store against its file system and against other stores (--path)"),
    "stores": ("banyan_lab.bench.stores", "any store by its URL: puts and gets as a server makes them (--store)"),
    "directory": ("banyan_lab.bench.directory", "lookups, leases and publications on a directory of realistic size"),
}
NEEDED = {"hooks": ("url", "URL"), "store": ("path", "DIR"), "stores": ("store", "URL")}
"""What is measured, where that is not this machine."""


def main(argv: Sequence[str]) -> int:
    """Run one measurement and print its rows; the process exit status."""
    args = _parser().parse_args(argv)
    for what, (option, form) in NEEDED.items():
        if (args.what == what) != (getattr(args, option) is not None):
            raise SystemExit(f"banyan bench: --{option} {form} belongs to {what}, which needs it")
    if args.path is not None and not os.path.isdir(args.path):
        raise SystemExit(f"banyan bench: --path {args.path}: no such folder: make one on the file system to measure")
    run = importlib.import_module(BENCHES[args.what][0]).run
    places = [getattr(args, NEEDED[args.what][0])] if args.what in NEEDED else []
    key = {} if args.api_key_file is None else {"api_key": args.api_key_file.read_text().strip()}
    result = run(*places, **key)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="banyan bench")
    parser.add_argument("what", choices=sorted(BENCHES), help="; ".join(f"{k}: {v[1]}" for k, v in BENCHES.items()))
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--path", help="store: the directory to measure in")
    parser.add_argument("--store", metavar="URL", help="stores: as --banyan-store names it, with room for 2 GB")
    parser.add_argument("--url", help="hooks: of the running server")
    parser.add_argument("--api-key-file", type=Path, help="hooks: holds the server's key, where it has one")
    return parser
