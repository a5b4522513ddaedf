# SPDX-License-Identifier: Apache-2.0
"""The main job in one command: real servers, a multi-turn chat workload twice in a row, sharing off against
on.

    python -m benchmark.demo --quick    # a first impression in a few minutes: off against on, once
    python -m benchmark.demo            # the short form, at most 15 minutes on two cores
    python -m benchmark.demo --full     # as the published benchmark of this sharing: history 20, 32 at a time

Servers come up in two groups, so that no more than two of them hold memory at once: first the single rank and
stock SGLang, which are only stood beside the others, then sharing off and on, which are measured alternately. Off and
on differ in sharing alone; stock, without banyan-cpu-engine, also has another attention backend and dispatcher.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmark.compare import Target, measure_alternately
from benchmark.control import control_costs
from benchmark.load import Arrivals, Progress
from benchmark.measure import RunResult, Workload
from benchmark.model import DEFAULT_TARGET, ModelUnavailable, ensure_model
from benchmark.processor import CPU_ENGINE
from benchmark.provenance import provenance
from benchmark.report import (
    ATTENTION,
    NAMES,
    RUNS,
    STOCK_DIFFERS,
    build_report,
    cached_again,
    number,
    outputs_compared,
    percent,
    plain_name,
    render_html,
)
from benchmark.results import append_lines
from benchmark.servers import Server, ServerFailed, ServerSpec, Share, cpu_env, unwind_on_sigterm, wait_ready
from benchmark.source_table import WHAT, cells_of, difference
from benchmark.workload.conversation import ChatTokenizer, Conversation
from benchmark.workload.generated import GENERATED, ChatShape, generate_conversations
from benchmark.workload.scripts import ScriptLimits, history_scripts, session_scripts
from benchmark.workload.sharegpt import DatasetError, file_of, load_conversations, openings

PAGE_SIZE = 16
WAITING_LINE_S = 15.0
"""Servers take minutes to start, and are looked for several times a second."""

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class DemoPlan:
    """How much is measured. `pool_tokens` is what one of the two ranks holds; a single rank gets twice that.
    `groups`: servers that are up together, one group after the other; the last one has Banyan's."""

    num_prompts: int
    repetitions: int
    stock_repetitions: int
    history_turns: int
    mean_answer_words: int
    output_len: int
    pool_tokens: int
    modes: tuple[str, ...]
    # One at a time where outputs are compared to the last token: torch rounds a matrix times one row and times several
    # rows differently now and then.
    concurrency: int = 1
    groups: tuple[tuple[str, ...], ...] = (("single", "stock"), ("off", "on"))


# Sized for two cores: SmolLM2-135M computes several hundred prompt tokens a second on one of them.
SHORT = DemoPlan(
    num_prompts=14,
    repetitions=3,
    stock_repetitions=1,
    history_turns=7,
    mean_answer_words=210,
    output_len=16,
    pool_tokens=32_768,
    modes=("history",),
)
QUICK = DemoPlan(
    num_prompts=6,
    repetitions=1,
    stock_repetitions=1,
    history_turns=7,
    mean_answer_words=210,
    output_len=8,
    pool_tokens=16_384,
    modes=("history",),
    groups=(("stock",), ("off", "on")),
)
FULL = DemoPlan(
    num_prompts=48,
    repetitions=3,
    stock_repetitions=1,
    history_turns=20,
    mean_answer_words=90,
    output_len=16,
    pool_tokens=98_304,
    modes=("history",),
    concurrency=32,
)


def server_specs(pool_tokens: int) -> dict[str, ServerSpec]:
    """The four servers: same model, same page size, same total pool."""

    def spec(label: str, dp: int, share: Share, *flags: str) -> ServerSpec:
        tokens = 2 * pool_tokens // dp
        return ServerSpec(
            label=label,
            dp=dp,
            share=share,
            args=(
                *(*CPU_ENGINE, "--max-total-tokens", str(tokens), "--context-length", "8192"),
                *("--page-size", str(PAGE_SIZE), "--sleep-on-idle", *flags),
            ),
            env=cpu_env(dp=dp, cores_per_rank=2 // dp),
        )

    return {
        "single": spec("single", 1, "off"),
        "stock": spec("stock", 2, "stock"),
        "off": spec("off", 2, "off"),
        # Round robin as the others: what is compared is sharing, not where a request runs.
        "on": spec("on", 2, "on", "--banyan-policy", "sglang"),
    }


def make_workloads(args: argparse.Namespace, plan: DemoPlan, tokenizer: ChatTokenizer) -> dict[str, Workload]:
    """One workload per mode. Raises DatasetError when no conversation fits."""
    limits = ScriptLimits(plan.num_prompts, plan.history_turns, 8192 - 64, plan.output_len)
    conversations = _conversations(args, plan)
    arrivals = Arrivals(concurrency=plan.concurrency)
    workloads = {}
    for mode in plan.modes:
        make = history_scripts if mode == "history" else session_scripts
        # A session is several requests; a third of the conversations gives about as many of them.
        chosen = conversations if mode == "history" else conversations[: max(1, plan.num_prompts // 3)]
        scripts = make(chosen, tokenizer, limits)
        if not scripts:
            raise DatasetError(f"--dataset {args.dataset}: no conversation passes the filters of mode {mode}")
        workloads[mode] = Workload(tuple(scripts), tokenizer, arrivals, args.seed)
    return workloads


def _conversations(args: argparse.Namespace, plan: DemoPlan) -> list[Conversation]:
    if args.dataset != GENERATED:
        return openings(load_conversations(Path(args.dataset)))
    shape = ChatShape(num_turns=plan.history_turns // 2 + 1, mean_answer_words=plan.mean_answer_words)
    return generate_conversations(plan.num_prompts, seed=args.seed, shape=shape)


class Demo:
    """One demonstration: the order of its steps is `run`; results are on disk as soon as they are there."""

    def __init__(self, plan: DemoPlan, workloads: dict[str, Workload], model: Path, out: Path) -> None:
        self._plan = plan
        self._workloads = workloads
        self._model = model
        self._out = out
        self._specs = server_specs(plan.pool_tokens)
        self._stage = ""
        self.results: dict[str, list[RunResult]] = {mode: [] for mode in workloads}
        self.servers: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        """Measure the groups, one after the other. Raises ServerFailed."""
        for stage, labels in enumerate(self._plan.groups, 1):
            self._stage = f"stage {stage} of {len(self._plan.groups)}"
            is_compared = not {"off", "on"}.isdisjoint(labels)
            repetitions = self._plan.repetitions if is_compared else self._plan.stock_repetitions
            self._measure_group(labels, repetitions)

    def _measure_group(self, labels: Sequence[str], repetitions: int) -> None:
        with ExitStack() as stack:
            names = " and ".join(NAMES[label] for label in labels)
            say(f"{self._stage}: starting {names} (imports take a minute or two)")
            servers = [
                stack.enter_context(Server(self._specs[label], self._model, self._out / "logs")) for label in labels
            ]
            wait_ready(servers, waiting=Waiting())
            for server in servers:
                self.servers[server.spec.label] = {
                    "start_up_s": round(server.start_up_s or 0.0, 1),
                    "memory_bytes": server.memory_bytes(),
                }
                say(f"{server.spec.label}: up after {server.start_up_s:.0f} s, {server.memory_bytes() / 2**30:.1f} GiB")
            targets = [Target(server.spec.label, server.url, server) for server in servers]
            for mode, workload in self._workloads.items():
                say(f"{self._stage}: {len(workload.scripts)} chats of mode {mode}, twice at each server")
                self.results[mode] += asyncio.run(
                    measure_alternately(
                        targets,
                        workload,
                        repetitions,
                        progress_of=_show_progress(mode),
                        finished=self._saver(mode),
                    )
                )
            for server in servers:
                self.servers[server.spec.label]["control"] = control_costs(server.url)

    def _saver(self, mode: str) -> Callable[[RunResult], None]:
        def save(result: RunResult) -> None:
            append_lines(self._out / "results.jsonl", ({"mode": mode, **line} for line in result.to_lines()))
            summary = result.summary
            ttft = summary["ttft_s"]["mean"] if summary["ttft_s"] else float("nan")
            say(
                f"{mode}, {result.label}, repetition {result.repetition}, run {result.run}: TTFT {ttft:.2f} s, "
                f"{percent(summary['cached_share'])} cached, {summary['total_time_s']:.0f} s, "
                f"{summary['num_errors']} failed"
            )

        return save


def say(line: str) -> None:
    """One progress line, with the time."""
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {line}", soft_wrap=True)


class Waiting:
    """Shows which servers are not up yet: on a terminal always in the same line, elsewhere a line every
    WAITING_LINE_S."""

    def __init__(self) -> None:
        self._said_s = 0.0

    def __call__(self, missing: list[str], elapsed_s: float) -> None:
        line = f"waiting for {', '.join(missing)}: {elapsed_s:.0f} s"
        if console.is_terminal:
            console.print(f"  {line}", end="\r")
        elif elapsed_s - self._said_s >= WAITING_LINE_S:
            self._said_s = elapsed_s
            say(line)


def _show_progress(mode: str) -> Callable[[str, int, int], Progress]:
    def of_run(label: str, repetition: int, run: int) -> Progress:
        def show(num_done: int, num_total: int) -> None:
            if console.is_terminal:
                line = f"  {mode}, {label}, repetition {repetition}, run {run}: {num_done}/{num_total}"
                console.print(line, end="\r")
            elif num_done * 4 // num_total != (num_done - 1) * 4 // num_total and num_done < num_total:
                say(f"  {label}, repetition {repetition}, run {run}: {num_done}/{num_total}")

        return show

    return of_run


def result_table(report: dict[str, Any], title: str) -> Table:
    """The figures of one mode, for a terminal of 80 columns."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("server", "attention"):
        table.add_column(column, no_wrap=True)
    for column in ("run", "TTFT", "(min-max)", "latency", "cached", "peer", "n"):
        table.add_column(column, justify="right")
    for run in RUNS:
        for label in NAMES:
            if label not in report["labels"]:
                continue
            figures = report["labels"][label][f"run_{run}"]
            ttft, latency = figures["ttft_s_mean"], figures["latency_s_mean"]
            if not ttft or not latency:
                continue
            table.add_row(
                plain_name(label),
                ATTENTION[label],
                str(run),
                f"{ttft['median']:.2f} s",
                f"{ttft['min']:.2f}-{ttft['max']:.2f}",
                f"{latency['median']:.2f} s",
                percent(figures["cached_share"]["median"]),
                f"{figures['cached_by_source']['peer']['median']:.0f}",
                str(figures["num_repetitions"]),
            )
    return table


def source_rows(report: dict[str, Any]) -> Table:
    """The published figures and those of this run, for the terminal."""
    title = f"published: {WHAT}; here: {difference(report['config'])}"
    table = Table(title=title, title_justify="left")
    table.add_column("off, on, on/off")
    for column in ("published, run 1", "published, run 2", "here, run 1", "here, run 2"):
        table.add_column(column, justify="right")
    for row in report["beside_the_source"]:
        cells = cells_of(row)
        table.add_row(row["metric"], *("  ".join(cells[at : at + 3]) for at in range(0, len(cells), 3)))
    return table


def write_report(demo: Demo, about: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write report.json and report.html to `out`; the first mode's figures are at the top level."""
    modes = list(demo.results)
    report = build_report(demo.results[modes[0]], {**about, "mode": modes[0], "servers": demo.servers})
    for mode in modes[1:]:
        report[mode] = build_report(demo.results[mode], {"mode": mode})
    (out / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    (out / "report.html").write_text(render_html(report))
    return report


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="sharing off against on, once, a few chats (some minutes)")
    size.add_argument("--full", action="store_true", help="the published benchmark instead (half an hour)")
    parser.add_argument("--num-prompts", type=int, help="conversations")
    parser.add_argument("--repetitions", type=int, help="alternations of sharing off and on")
    parser.add_argument("--output-len", type=int, help="cap on tokens per answer")
    parser.add_argument("--pool-tokens", type=int, help="KV pool of one of the two ranks, in tokens")
    parser.add_argument("--concurrency", type=int, help="conversations at a time")
    parser.add_argument("--server", action="append", choices=list(NAMES), help="only these; repeat it")
    parser.add_argument("--apart", action="store_true", help="one server up at a time: all memory for its pools")
    parser.add_argument("--mode", action="append", choices=("history", "session"), help="default: history")
    parser.add_argument("--dataset", default=GENERATED, help="ShareGPT-format file or its folder, or `generated`")
    parser.add_argument("--model", type=Path, default=DEFAULT_TARGET, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="default: build/demo, with --full build/bench")
    return parser


def plan_of(args: argparse.Namespace) -> DemoPlan:
    """The plan that the options ask for."""
    plan = FULL if args.full else QUICK if args.quick else SHORT
    changes = {
        name: value
        for name in ("num_prompts", "repetitions", "output_len", "pool_tokens", "concurrency")
        if (value := getattr(args, name)) is not None
    }
    for name, value in changes.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    modes = {"modes": tuple(dict.fromkeys(args.mode))} if args.mode else {}
    groups = tuple((label,) for group in plan.groups for label in group) if args.apart else plan.groups
    if args.server:
        groups = tuple(filter(None, (tuple(label for label in group if label in args.server) for group in groups)))
        if not groups:
            raise ValueError(f"--server {' '.join(args.server)}: this form of the demonstration has none of them")
    return DemoPlan(**{**plan.__dict__, **changes, **modes, "groups": groups})


def _describe(args: argparse.Namespace, plan: DemoPlan, workloads: dict[str, Workload]) -> dict[str, Any]:
    scripts = next(iter(workloads.values())).scripts
    return {
        "model": args.model.name,
        "dataset": args.dataset if args.dataset == GENERATED else file_of(Path(args.dataset)).name,
        "seed": args.seed,
        "page_size": PAGE_SIZE,
        "one_server_at_a_time": args.apart,
        "mean_prompt_tokens": round(sum(script.prompt_len for script in scripts) / len(scripts)),
        **{
            name: value if name != "modes" else list(value) for name, value in plan.__dict__.items() if name != "groups"
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    out = args.out or Path("build/bench" if args.full else "build/demo")
    start_s = time.monotonic()
    unwind_on_sigterm()
    try:
        plan = plan_of(args)
        say(f"reading the model and making {plan.num_prompts} chats")
        model = ensure_model(args.model)
        from benchmark.workload.tokenizer import HuggingFaceTokenizer

        workloads = make_workloads(args, plan, HuggingFaceTokenizer(str(model)))
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").unlink(missing_ok=True)
        about: dict[str, Any] = {"config": _describe(args, plan, workloads)}
        demo = Demo(plan, workloads, model, out)
        demo.run()
    except (ServerFailed, ModelUnavailable, ValueError) as error:
        console.print(f"banyan demo: {error}", style="red", markup=False)
        return 1
    about |= {"provenance": provenance(), "duration_s": round(time.monotonic() - start_s, 1)}
    report = write_report(demo, about, out)
    show(report, out)
    return 1 if report["num_errors"] else 0


def show(report: dict[str, Any], out: Path) -> None:
    """The tables and the verdict, on the terminal."""
    printer = Console()
    printer.print(result_table(report, "history: one request per chat; mean TTFT"))
    if "session" in report:
        printer.print(result_table(report["session"], "session: every turn a request; mean TTFT"))
    if report.get("config", {}).get("concurrency", 1) > 1 and report["beside_the_source"]:
        printer.print(source_rows(report))
    outputs = outputs_compared(report)
    first, second = number(report["ttft_ratio_first_run"]), number(report["ttft_ratio_second_run"])
    printer.print(
        f"TTFT, sharing on/off: first run {first}, second run {second}. "
        f"Cached in the second run: on {percent(cached_again(report, 'on'))}, "
        f"off {percent(cached_again(report, 'off'))}. "
        f"Outputs identical to {plain_name(outputs['reference'])}: "
        f"{outputs['num_compared'] - outputs['num_differing']}/{outputs['num_compared']}. "
        f"Scheduler time spent in Banyan: {percent(report['control_share'], digits=2)}."
    )
    if "stock" in report["labels"]:
        printer.print(STOCK_DIFFERS)
    printer.print(f"report: {out / 'report.html'}  {out / 'report.json'}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
