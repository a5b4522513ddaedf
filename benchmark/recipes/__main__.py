# SPDX-License-Identifier: Apache-2.0
"""python -m benchmark.recipes [--data FOLDER] [--write-docs]: leaves build/recipes/report.json.

``FOLDER`` has ``recipes.jsonl`` and ``models``; without it a short list of our own is judged. What is refused is judged
again with the way out that the refusal names. Ends with 1 when a dry run has crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmark.provenance import place_and_time, provenance
from benchmark.recipes import lines, table, ways_out
from benchmark.recipes.lines import Line, Verdict
from benchmark.results import write_report

KIND_OF = {
    "H": "hopper",
    "B200": "blackwell",
    "GB200": "blackwell",
    "B300": "blackwell-ultra",
    "GB300": "blackwell-ultra",
}
STAND_IN = Path("test/cuda_stand_in")
ENVIRONMENT = {
    "CUDA_STAND_IN": "late",
    "SGLANG_USE_CPU_ENGINE": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.recipes", description="Judge published launch lines.")
    parser.add_argument("--data", type=Path, help="folder with recipes.jsonl and models")
    parser.add_argument("--out", type=Path, default=Path("build/recipes"))
    parser.add_argument("--write-docs", action="store_true", help="write docs/recipes.md")
    args = parser.parse_args(argv)
    wanted = lines.our_own() if args.data is None else lines.of_folder(args.data)
    found = judged_by_kind(wanted)
    for line, verdict in found:
        print(f"{line.name:8s} {'shared' if verdict.is_shared else '; '.join(verdict.reasons)}", flush=True)
    outs = ways_out.tried(found, judged_by_kind)
    for line, verdict in outs:
        print(f"{line.name:8s} with its way out: {ways_out.outcome(line, verdict)} {'; '.join(verdict.reasons)}")
    report = {"rows": list(map(_row, found)), "ways_out": [_row(one) | {"words": one[0].words} for one in outs]}
    write_report(args.out / "report.json", report, args)
    print(table.summary(found))
    if args.write_docs:
        Path("docs/recipes.md").write_text(table.page(found, outs, place_and_time(provenance())))
    return 1 if any(verdict.has_crashed for _, verdict in [*found, *outs]) else 0


def _row(one: tuple[Line, Verdict]) -> dict[str, object]:
    line, verdict = one
    return {"line": line.name, "family": line.family, "is_shared": verdict.is_shared, "reasons": verdict.reasons}


def judged_by_kind(wanted: Sequence[Line]) -> list[tuple[Line, Verdict]]:
    """The verdicts of the lines, by kind of GPU."""
    return [one for kind in sorted(set(map(kind_of, wanted))) for one in judged(kind, wanted)]


def kind_of(line: Line) -> str:
    return KIND_OF.get(line.gpu, KIND_OF["H"])


def judged(kind: str, wanted: Iterable[Line]) -> list[tuple[Line, Verdict]]:
    """The verdicts of the lines for this kind of GPU, made by a process that sees nothing else."""
    own = [line for line in wanted if kind_of(line) == kind]
    asked = "".join(json.dumps(_asked(line)) + "\n" for line in own)
    paths = os.pathsep.join((str(STAND_IN), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.recipes.judging", kind],
        input=asked,
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
    )
    if done.returncode:
        raise SystemExit(f"{done.stderr}recipes: who judges the lines for {kind} has ended with {done.returncode}")
    said = [json.loads(row) for row in done.stdout.splitlines()]
    return [
        (
            line,
            Verdict(not (one["refused"] or one["crashed"]), bool(one["crashed"]), (*one["refused"], *one["crashed"])),
        )
        for line, one in zip(own, said, strict=True)
    ]


def _asked(line: Line) -> dict[str, object]:
    arguments = ["--model-path", str(line.model), *line.arguments, "--enable-banyan"]
    return {"arguments": arguments, "variables": dict(line.variables)}


if __name__ == "__main__":
    sys.exit(main())
