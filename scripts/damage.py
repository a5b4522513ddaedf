#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build and run the harness that damages the files of a store (sgl-kernel/crates/banyan-store/examples/damage)."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

KERNEL = Path(__file__).parents[1] / "sgl-kernel"
NUM_SEEDS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=NUM_SEEDS, help="run the seeds 1 to SEEDS")
    which.add_argument("--seed", type=int, help="run one seed and say what it does")
    parser.add_argument("--dir", type=Path, help="where the stores are made; a temporary directory if absent")
    args = parser.parse_args()
    # Not for release: numbers that overflow are found.
    subprocess.run(["cargo", "build", "-q", "-p", "banyan-store", "--example", "damage"], cwd=KERNEL, check=True)
    what = [str(args.seeds)] if args.seed is None else ["--seed", str(args.seed)]
    folder = tempfile.mkdtemp(prefix="banyan-damage-", dir=args.dir)
    status = subprocess.run([KERNEL / "target/debug/examples/damage", folder, *what]).returncode
    if status == 0:
        shutil.rmtree(folder)
    else:
        print(f"the stores of the failed seeds are kept in {folder}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
