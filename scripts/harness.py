#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build and run a harness of the store (sgl-kernel/crates/banyan-store/examples): ``crash`` kills its writers and cuts
the power, ``damage`` changes its files."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

KERNEL = Path(__file__).parents[1] / "sgl-kernel"
BUILDS = {
    "crash": ("tested", ("--profile", "tested")),
    # Not for release: numbers that overflow are found.
    "damage": ("debug", ()),
}
"""Where cargo leaves each, and how it is built."""
NUM_SEEDS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("harness", choices=BUILDS)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=NUM_SEEDS, help="run the seeds 1 to SEEDS")
    which.add_argument("--seed", type=int, help="run one seed and say what it does")
    parser.add_argument("--dir", type=Path, help="where the stores are made; a temporary directory if absent")
    args = parser.parse_args()
    left_in, options = BUILDS[args.harness]
    build = ["cargo", "build", "-q", *options, "-p", "banyan-store", "--example", args.harness]
    subprocess.run(build, cwd=KERNEL, check=True)
    what = [str(args.seeds)] if args.seed is None else ["--seed", str(args.seed)]
    folder = tempfile.mkdtemp(prefix=f"banyan-{args.harness}-", dir=args.dir)
    status = subprocess.run([KERNEL / "target" / left_in / "examples" / args.harness, folder, *what]).returncode
    if status == 0:
        shutil.rmtree(folder)
    else:
        print(f"the stores of the failed seeds are kept in {folder}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
