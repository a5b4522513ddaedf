# SPDX-License-Identifier: Apache-2.0
"""Multi-turn chats against running servers, played twice in a row: time to first token and cache hits.

    python -m benchmark.sharegpt_multiturn --port 30000 --dataset generated --tokenizer MODEL_FOLDER
    python -m benchmark.sharegpt_multiturn --server off=URL,PID --server on=URL,PID --repetitions 3 ...

`--mode history` sends one request per conversation with its last messages as context; `--mode session` plays
every user turn in order, on top of the model's own answers. Each run after the first takes the conversations
in another seeded order. With several `--server`, they are measured alternately while the others sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a file: Python then looks for modules beside it, not where `benchmark` itself is found.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark.compare import Target, mean_ttft_ratio, measure_alternately
from benchmark.load import Arrivals, Progress
from benchmark.measure import RunResult, Workload, flush_cache, measure
from benchmark.processes import ProcessSession
from benchmark.provenance import provenance
from benchmark.results import append_lines
from benchmark.workload.conversation import ChatTokenizer, Conversation
from benchmark.workload.generated import GENERATED, ChatShape, generate_conversations
from benchmark.workload.scripts import ScriptLimits, history_scripts, session_scripts
from benchmark.workload.sharegpt import DatasetError, load_conversations, openings


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sharegpt_multiturn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_argument_group("servers")
    where.add_argument("--host", default="127.0.0.1")
    where.add_argument("--port", type=int, default=30000)
    where.add_argument("--url", help="base URL, instead of --host and --port")
    where.add_argument("--server-label", default="server", help="name of the server in results")
    where.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="LABEL=URL[,PID]",
        help="compare several: give it once each; PID leads a session that may be put to sleep",
    )
    where.add_argument("--repetitions", type=int, default=1, help="alternations between several servers")
    where.add_argument("--use-openai-api", action="store_true", help="/v1/chat/completions instead of /generate")
    where.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds one request may take")
    what = parser.add_argument_group("workload")
    what.add_argument("--dataset", default=GENERATED, help="ShareGPT-format file (.json, .jsonl, .gz) or `generated`")
    what.add_argument("--openings", action="store_true", help="only conversations whose id ends in _0 (or has no _)")
    what.add_argument("--tokenizer", required=True, help="folder of the model's tokenizer")
    what.add_argument("--mode", choices=("history", "session"), default="history")
    what.add_argument("--num-prompts", type=int, default=100, help="conversations (history: as many requests)")
    what.add_argument("--history-turns", type=int, default=6, help="messages of context")
    what.add_argument("--max-total-tokens", type=int, default=8192, help="drop what is longer than this")
    what.add_argument("--output-len", type=int, default=32, help="cap on tokens per answer")
    what.add_argument("--shared-system-prompt", default="", metavar="TEXT|FILE", help="put before every conversation")
    what.add_argument("--runs", type=int, default=2, help="times the workload is played on the live server")
    what.add_argument("--concurrency", type=int, help="conversations at a time (default: all)")
    what.add_argument("--request-rate", type=float, default=float("inf"), help="conversations per second, Poisson")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument(
        "--flush-cache", action="store_true", help="empty the caches before run 1 (always when comparing)"
    )
    out = parser.add_argument_group("results")
    out.add_argument("--result", type=Path, metavar="FILE.jsonl", help="append requests and summaries to this file")
    return parser


def make_workload(args: argparse.Namespace, tokenizer: ChatTokenizer) -> Workload:
    """The workload that the options describe. Raises ValueError (DatasetError) naming what is wrong."""
    arrivals = Arrivals(concurrency=args.concurrency, request_rate_per_s=args.request_rate, seed=args.seed)
    limits = ScriptLimits(args.num_prompts, args.history_turns, args.max_total_tokens, args.output_len)
    make = history_scripts if args.mode == "history" else session_scripts
    system_prompt = text_or_file(args.shared_system_prompt)
    scripts = make(_conversations(args), tokenizer, limits, system_prompt=system_prompt)
    if not scripts:
        raise DatasetError(f"--dataset {args.dataset}: no conversation passes the filters")
    description = {
        name: value for name, value in vars(args).items() if name not in ("result", "server", "url", "tokenizer")
    }
    # Paths tell about a machine, names about a measurement.
    description.update(dataset=Path(args.dataset).name, request_rate=str(args.request_rate))
    description.update(shared_system_prompt=len(system_prompt), num_scripts=len(scripts))
    return Workload(
        scripts=tuple(scripts),
        tokenizer=tokenizer,
        arrivals=arrivals,
        seed=args.seed,
        num_runs=args.runs,
        api="openai" if args.use_openai_api else "native",
        timeout_s=args.timeout,
        description=description,
    )


def text_or_file(value: str) -> str:
    """The text of the file that `value` names, or `value` itself."""
    try:
        return Path(value).read_text() if value and Path(value).is_file() else value
    except OSError:
        # Longer than a file name may be: then it is a text.
        return value


def parse_targets(values: Sequence[str]) -> list[Target]:
    """Targets from `label=url[,pid]`. Raises ValueError for anything else."""
    targets = []
    for value in values:
        label, equals, rest = value.partition("=")
        url, _, pid = rest.partition(",")
        if not (label and equals and url.startswith("http")) or (pid and not pid.isdigit()):
            raise ValueError(f"--server wants LABEL=URL[,PID], not {value!r}")
        targets.append(Target(label, url.rstrip("/"), ProcessSession(int(pid)) if pid else None))
    return targets


def _conversations(args: argparse.Namespace) -> list[Conversation]:
    if args.dataset == GENERATED:
        # In a history request the last answer is the target, so one exchange more than the context is needed.
        shape = ChatShape(num_turns=max(1, args.history_turns // 2 + 1))
        return generate_conversations(args.num_prompts, seed=args.seed, shape=shape)
    conversations = load_conversations(Path(args.dataset))
    return openings(conversations) if args.openings else conversations


async def _measure(args: argparse.Namespace, workload: Workload) -> list[RunResult]:
    save = _saver(args, workload)
    if args.server:
        targets = parse_targets(args.server)
        return await measure_alternately(targets, workload, args.repetitions, progress_of=_progress, finished=save)
    url = (args.url or f"http://{args.host}:{args.port}").rstrip("/")
    if args.flush_cache:
        await flush_cache(url)
    label = args.server_label
    return await measure(label, url, workload, progress=lambda run: _progress(label, 1, run), finished=save)


def _saver(args: argparse.Namespace, workload: Workload) -> Callable[[RunResult], None]:
    about = {"provenance": provenance(), "config": workload.description, "seed": args.seed}

    def save(result: RunResult) -> None:
        print(describe(result), flush=True)
        if args.result is not None:
            *requests, run = result.to_lines()
            append_lines(args.result, [*requests, {**run, **about}])

    return save


def _progress(label: str, repetition: int, run: int) -> Progress:
    def show(num_done: int, num_total: int) -> None:
        end = "\n" if num_done == num_total else ""
        print(
            f"\r{label} repetition {repetition} run {run}: {num_done}/{num_total}",
            end=end,
            file=sys.stderr,
            flush=True,
        )

    return show


def describe(result: RunResult) -> str:
    """A few lines that say what one run gave."""
    summary: dict[str, Any] = result.summary
    lines = [
        f"== {result.label}, repetition {result.repetition}, run {result.run}: "
        f"{summary['num_completed']} completed, {summary['num_errors']} failed, "
        f"{summary['total_time_s']:.1f} s",
        f"   tokens: {summary['nominal_tokens']} nominal, {summary['served_tokens']} served; "
        f"{summary['completed_per_s']} requests/s",
    ]
    for name in (
        "ttft_s",
        "latency_s",
        "latency_per_token_ms",
        "time_per_output_token_ms",
        "inter_token_latency_ms",
    ):
        if summary[name]:
            figures = "  ".join(
                f"{quantile} {summary[name][quantile]:.3f}" for quantile in ("mean", "p50", "p90", "p99")
            )
            lines.append(f"   {name:26} {figures}")
    sources = ", ".join(f"{source} {num}" for source, num in summary["cached_by_source"].items() if num)
    lines.append(f"   cached share {summary['cached_share']}: {sources or 'nothing'}; by rank {summary['by_rank']}")
    lines.extend(f"   failed: {error}" for error in summary["errors"])
    return "\n".join(lines)


def spelled(argv: Sequence[str]) -> list[str]:
    """`argv` with dashes in the names of options: other ShareGPT scripts write `--use_openai_api`."""
    names = (argument.partition("=") for argument in argv)
    return [
        name.replace("_", "-") + sign + value if name.startswith("--") else name + sign + value
        for name, sign, value in names
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(spelled(sys.argv[1:] if argv is None else argv))
    try:
        from benchmark.workload.tokenizer import HuggingFaceTokenizer

        workload = make_workload(args, HuggingFaceTokenizer(args.tokenizer))
        parse_targets(args.server)
    except (ValueError, OSError) as error:
        print(f"sharegpt_multiturn: {error}", file=sys.stderr)
        return 2
    results = asyncio.run(_measure(args, workload))
    labels = list(dict.fromkeys(result.label for result in results))
    for label in labels[1:]:
        for run in range(1, args.runs + 1):
            ratio = mean_ttft_ratio(results, label, labels[0], run)
            if ratio:
                print(
                    f"mean TTFT {label}/{labels[0]}, run {run}: {ratio['median']:.3f} "
                    f"({ratio['min']:.3f}-{ratio['max']:.3f})"
                )
    return 1 if any(result.summary["num_errors"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
