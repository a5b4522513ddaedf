#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build and run the store's crash harness (sgl-kernel/crates/banyan-store/examples/crash.rs)."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

KERNEL = Path(__file__).parents[1] / "sgl-kernel"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seeds", type=int, help="run the seeds 1 to SEEDS")
    which.add_argument("--seed", type=int, help="run one seed and say what it does")
    parser.add_argument("--dir", type=Path, help="where the stores are made; a temporary directory if absent")
    args = parser.parse_args()
    build = ["cargo", "build", "-q", "--profile", "tested", "-p", "banyan-store", "--example", "crash"]
    subprocess.run(build, cwd=KERNEL, check=True)
    what = [str(args.seeds)] if args.seed is None else ["--seed", str(args.seed)]
    folder = tempfile.mkdtemp(prefix="banyan-crash-", dir=args.dir)
    status = subprocess.run([KERNEL / "target/tested/examples/crash", folder, *what]).returncode
    if status == 0:
        shutil.rmtree(folder)
    else:
        print(f"the stores of the failed seeds are kept in {folder}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
