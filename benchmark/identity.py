# SPDX-License-Identifier: Apache-2.0
"""Are greedy outputs with Banyan those of stock SGLang, request by request?

    python -m benchmark.identity --num-prompts 104

Two servers, stock and Banyan on, answer the same chats twice (the second time in another order, so that half of them
meet the other rank), one request at a time: torch rounds a matrix times one row and times several rows differently
now and then, so two servers agree to the last token only when their decode batches do. And every chat begins with
words of its own, so that no two share a page: the bits of a page depend, in the last place, on the length of the prompt
that computed it, so what a shared page holds, and with it stock's answer, depends on which prompt came to a rank first
(docs/design/0003). Correctness, not speed: both servers run at once. Writes build/identity/report.json; exit status 1
unless all outputs are identical.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmark.demo import SHORT, make_workloads, server_specs
from benchmark.measure import RunResult, Workload, measure
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.outputs import compare_outputs
from benchmark.results import write_report
from benchmark.servers import Server, unwind_on_sigterm, wait_ready
from benchmark.workload.conversation import Message
from benchmark.workload.generated import GENERATED

LABELS = ("stock", "on")


def with_own_openings(workload: Workload) -> Workload:
    """The same chats, each under a system prompt that names it."""
    scripts = []
    for number, script in enumerate(workload.scripts):
        (step,) = script.steps
        said = [message for message in step.messages if message.role != "system"]
        step = replace(step, messages=(Message("system", f"Chat {number:04d}. Answer briefly."), *said))
        prompt_len = len(workload.tokenizer.chat_ids(step.messages))
        scripts.append(replace(script, steps=(step,), prompt_len=prompt_len))
    return replace(workload, scripts=tuple(scripts))


async def play_both(servers: Sequence[Server], workload: Workload) -> list[RunResult]:
    """Both servers side by side, each one request at a time."""
    runs = await asyncio.gather(*(measure(server.spec.label, server.url, workload) for server in servers))
    return [result for results in runs for result in results]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.identity", description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=104, help="chats; each is asked twice of each server")
    parser.add_argument("--dataset", default=GENERATED, help="ShareGPT-format file, or `generated`")
    parser.add_argument("--mean-answer-words", type=int, default=100, help="length of the generated chats")
    parser.add_argument("--output-len", type=int, default=SHORT.output_len)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/identity"))
    args = parser.parse_args(argv)
    args.concurrency = 1
    unwind_on_sigterm()
    from benchmark.workload.tokenizer import HuggingFaceTokenizer

    model = ensure_model(DEFAULT_TARGET)
    plan = replace(
        SHORT, num_prompts=args.num_prompts, output_len=args.output_len, mean_answer_words=args.mean_answer_words
    )
    workload = with_own_openings(make_workloads(args, plan, HuggingFaceTokenizer(str(model)))["history"])
    # Room for all prompts in each rank: what an eviction makes a server compute again is another question.
    pool_tokens = sum(script.prompt_len + args.output_len + 16 for script in workload.scripts)
    specs = server_specs(pool_tokens)
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(specs[label], model, args.out / "logs")) for label in LABELS]
        wait_ready(servers)
        results = asyncio.run(play_both(servers, workload))
    outputs = compare_outputs(results, "on", "stock")
    cached = {f"{result.label}, run {result.run}": result.summary["cached_by_source"] for result in results}
    report = {**outputs, "cached_by_source": cached}
    write_report(args.out / "report.json", report, args)
    print(json.dumps(report, indent=2))
    return 0 if outputs["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
