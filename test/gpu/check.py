# SPDX-License-Identifier: Apache-2.0
"""``make gpu-check``: proves the GPU path on this machine, step by step; every step fits into eight minutes.

    python test/gpu/check.py [STEP ...]     or: --list, or: first

Run it again after an interruption: what was proved for this commit is not done again. Named steps are. Results lie in
``OUT_DIR`` (build/gpu): ``summary.json``, and for each step what it printed. ``MODEL_PATH``, ``MLA_MODEL_PATH``,
``DSA_MODEL_PATH``, ``WINDOW_MODEL_PATH``, ``MTP_MODEL_PATH``, a model that predicts several tokens, and
``DRAFT_MODEL_PATH``, an EAGLE draft of the first, name models for the server. Nothing is fetched. The exit status is 1
when a step has failed, or none was proved. ``--list`` says what would be run. ``first`` stands for the steps that come
first and tell in minutes whether the rest is worth its time. ``JOBS`` steps run at the same time, those that measure
alone behind them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

from engine import STAND_IN, die_with_parent, end_on_termination
from steps import FIRST, LIMIT_S, PROVED, STEPS, Facts, Ledger, Step, first_verdict, in_turns, ledger_of, plan, said_by

from banyan.cli.doctor_gpu import page_hash_obstacles

ROOT = Path(__file__).parents[2]
MODULES = ("pytest", "hypothesis", "sglang", "sgl_kernel", "flashinfer", "sgl_kernel.flash_attn")
TOOLS = ("compute-sanitizer",)
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""SGLang gives its processes as many."""
POLL_S = 0.2
PATIENCE_S = 60.0
"""For a step that is out of time to stop its servers."""


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def commit() -> str:
    """Of the working tree, and whether it has changed since; of a bundle, that of who has packed it."""
    packed = ROOT / "COMMIT"
    if packed.exists():
        return packed.read_text().strip()
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "no repository"


def find_facts() -> Facts:
    try:
        import torch
        import triton
        from cuda.bindings import driver

        from banyan import _native  # noqa: F401
    except ImportError as error:
        return Facts(commit(), "no GPU", 0, no_gpu=str(error))
    if not torch.cuda.is_available():
        return Facts(commit(), "no GPU", 0, no_gpu="no CUDA GPU on this machine")
    gpu = torch.cuda.get_device_properties(0)
    version = driver.cuDriverGetVersion()[1]
    print(f"{gpu.name}, driver for CUDA {version}, torch {torch.__version__}, Triton {triton.__version__}", flush=True)
    num_gpus = torch.cuda.device_count()
    return Facts(
        commit=commit(),
        gpu=gpu.name,
        num_gpus=num_gpus,
        sm=10 * gpu.major + gpu.minor,
        apart=tuple(
            (one, other)
            for one, other in combinations(range(num_gpus), 2)
            if not (torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one))
        ),
        modules=frozenset(name for name in MODULES if is_there(name)),
        tools=frozenset(name for name in TOOLS if shutil.which(name)),
        missing_to_compile=tuple(
            name for name in page_hash_obstacles() if STAND_IN not in os.environ or name != "nvcc"
        ),
        model_path=os.environ.get("MODEL_PATH", ""),
        mla_model_path=os.environ.get("MLA_MODEL_PATH", ""),
        dsa_model_path=os.environ.get("DSA_MODEL_PATH", ""),
        draft_model_path=os.environ.get("DRAFT_MODEL_PATH", ""),
        window_model_path=os.environ.get("WINDOW_MODEL_PATH", ""),
        state_model_path=os.environ.get("STATE_MODEL_PATH", ""),
        mtp_model_path=os.environ.get("MTP_MODEL_PATH", ""),
    )


@dataclass(frozen=True)
class Running:
    """A step's process, and what it prints to."""

    step: Step
    process: subprocess.Popen
    began_s: float

    def status(self) -> int | None:
        """How it ended; None while it runs. One that is out of time is stopped."""
        if self.process.poll() is None and time.monotonic() - self.began_s > LIMIT_S:
            self.stop()
            return -signal.SIGTERM
        return self.process.poll()

    def stop(self) -> None:
        """End it, if it has not ended; its servers first, by itself."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                try:
                    self.process.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    continue


def start(step: Step, facts: Facts, out: Path) -> Running:
    """What it prints goes to ``out``."""
    command = [sys.executable, *step.arguments(facts, str(out))]
    if step.tool:
        command = ["compute-sanitizer", "--tool", step.tool, "--error-exitcode", "1", *command]
    paths = [str(ROOT), str(ROOT / "python"), str(ROOT / "lab"), os.environ.get("PYTHONPATH", "")]
    environment = {QUEUES: "8", **os.environ, "PYTHONPATH": ":".join(paths), "PYTHONUNBUFFERED": "1"}
    with (out / f"{step.name}.txt").open("w") as printed:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
    return Running(step, process, time.monotonic())


def run_all(
    steps: Sequence[Step], facts: Facts, out: Path, *, num_at_once: int, ended: Callable[[Running, int], None]
) -> None:
    """``ended`` hears of each step and its status."""
    waiting, running = list(steps), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < num_at_once:
                print(f"[gpu-check] {waiting[0].name} ...", flush=True)
                running.append(start(waiting.pop(0), facts, out))
            time.sleep(POLL_S)
            for one in list(running):
                status = one.status()
                if status is not None:
                    running.remove(one)
                    ended(one, status)
    finally:
        for one in running:
            one.stop()


def load(path: Path) -> Ledger:
    return ledger_of(json.loads(path.read_text())) if path.exists() else Ledger()


def save(ledger: Ledger, path: Path) -> None:
    written = path.with_suffix(".new")
    written.write_text(json.dumps({name: asdict(known) for name, known in ledger.outcomes.items()}, indent=2) + "\n")
    written.replace(path)


def main(chosen: list[str]) -> int:
    end_on_termination()
    out = Path(os.environ.get("OUT_DIR", ROOT / "build/gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    facts, path, num_jobs = find_facts(), out / "summary.json", int(os.environ.get("JOBS", "1"))
    if chosen == ["--list"]:
        print("\n".join(plan(facts)))
        return 0
    ledger = load(path)
    chosen = [name for word in chosen for name in (FIRST if word == "first" else (word,))]
    try:
        to_do = ledger.to_do(facts, chosen)
    except ValueError as error:
        raise SystemExit(f"gpu-check: {error}; steps: {' '.join(step.name for step in STEPS)}") from error
    save(ledger, path)
    began_all_s = time.monotonic()

    def note(one: Running, status: int) -> None:
        said = said_by((out / f"{one.step.name}.txt").read_text(errors="replace"))
        ledger.note(one.step, facts, status=status, seconds=time.monotonic() - one.began_s, said=said)
        save(ledger, path)
        print(f"[gpu-check] {ledger.line(one.step, facts)}", flush=True)
        if one.step.name == FIRST[-1]:
            took_s = time.monotonic() - began_all_s
            print(f"[gpu-check] first verdict after {took_s:.0f} s: {first_verdict(ledger, facts)}", flush=True)

    for steps, num_at_once in in_turns(to_do, num_jobs):
        run_all(steps, facts, out, num_at_once=num_at_once, ended=note)
    print("\n".join(ledger.summary(facts)))
    print(f"[gpu-check] results in {out}")
    return 0 if ledger.num(facts, PROVED) and not ledger.has_failed(facts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
