# SPDX-License-Identifier: Apache-2.0
"""Banyan under a prefill and a decode server, against a pair without it, both behind `banyan route`.

    python -m benchmark.pd [--quick]

Two pairs run side by side, each of which has one request at a time. The pair without sharing has the CPU engine's fixes
only (`--banyan-share off`), among them that its pools are registered as DRAM, without which no pair runs on a CPU.
Servers are forked from one process (`warm`).

1. Conversations, all of them turn by turn, so that answers are written while others are asked. Both pairs get the same
   prompts at the same time, which go on with the answers of the pair with Banyan. Counted: how many of the full pages
   of the answer before were supplied by the linker of the prefill server (`next_turn_cached_share`). Compared: greedy
   tokens, with those of a server that is no pair and shares nothing, and is asked the same in the same order when the
   pairs have ended (`pd_outputs_identical`): its two ranks have half of the conversations each, one request at a time.
   It finds in its own cache what it has generated itself, as the prefill server finds what the decode server has. The
   stock pair computes the answer before as a part of the prompt, which may round in another way: how many of its
   answers are the same is counted too, and those to first turns have to be.
2. Prompts that nobody has seen (`pd_times`), one request at a time. `--times`: only these.
3. A next turn of which both servers have all but some 5 %: how many of its prompt's pages the prefill server sends.
   A decode server without a cache of its own is sent all of them.
4. When all is done: what the decode server's tree still locks, and whether one request gets its whole pool.
5. The decode server is killed while the prompt of a request is computed, and started again: whether the request, which
   waits in the router, has the right answer.

After that, where this may make networks of its own: what `--slow` and `--classes` measure, unless `--no-networks`.
`--quick` leaves these out, and whether one request gets the whole pool, and the killed server. Writes
build/pd/report.json. Exits with 1 when a figure that does not depend on time misses its mark.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmark import own_network, pd_agents, pd_classes, pd_dual, pd_slow, pd_times
from benchmark.engine import Engine
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.modes.models import LLAMA, ensure
from benchmark.pd_checks import (
    DECODE_POOL_TOKENS,
    compare_with_alone,
    gets_whole_pool,
    hand_over_ratio,
    killed_decode,
    locked_when_idle,
)
from benchmark.pd_servers import PAGE_TOKENS, START_TIMEOUT_S, Pair
from benchmark.results import write_report
from benchmark.servers import unwind_on_sigterm
from benchmark.store_server import prompts
from benchmark.warm import ForkedServer


@dataclass(frozen=True)
class Sizes:
    """How much is asked."""

    num_conversations: int = 40
    num_turns: int = 4
    first_tokens: int = 200
    question_tokens: int = 40
    answer_tokens: int = 20
    times: pd_times.Sizes = field(default_factory=pd_times.Sizes)
    hand_over_tokens: int = 1900
    prefill_pool_tokens: int = 24_000


LONG_PARTS = ("rows", "counters", "slow", "classes")
"""Of a report; the figures are what is left."""

QUICK = Sizes(
    num_conversations=2,
    num_turns=2,
    first_tokens=96,
    question_tokens=24,
    answer_tokens=36,
    times=pd_times.Sizes(num_rounds=2, prompts_per_round=2, prompt_tokens=120),
    hand_over_tokens=960,
    prefill_pool_tokens=6_000,
)


@dataclass
class Talk:
    """One conversation; ``questions`` are the tokens of each turn."""

    questions: list[list[int]]
    prompt: list[int] = field(default_factory=list)
    num_before: int = 0
    """Tokens of the prompt before, whose pages the prefill server has itself."""


def num_answer_pages(num_prompt_tokens: int, num_answer_tokens: int) -> int:
    """Full pages that an answer adds for certain: its last token's KV is computed only by a step that was begun before
    the answer's end was seen."""
    return (num_prompt_tokens + num_answer_tokens - 1) // PAGE_TOKENS - num_prompt_tokens // PAGE_TOKENS


def num_found_pages(details: Mapping[str, int] | None) -> int:
    """Pages that the prefill server's linker supplied. What a decode server has itself counts as ``device``."""
    found = details or {}
    return sum(found.get(tier, 0) for tier in ("host", "storage", "peer")) // PAGE_TOKENS


def make_talks(model: Path, sizes: Sizes, seed: int) -> list[Talk]:
    lengths = [sizes.first_tokens, *[sizes.question_tokens] * (sizes.num_turns - 1)]
    texts = iter(prompts(model, lengths * sizes.num_conversations, seed=seed))
    return [Talk([next(texts) for _ in lengths]) for _ in range(sizes.num_conversations)]


def converse(talks: Sequence[Talk], urls: Mapping[str, str], sizes: Sizes) -> list[dict[str, Any]]:
    """Every turn of every conversation, asked of each pair; one row for each turn."""
    rows = []
    for turn in range(sizes.num_turns):
        for number, talk in enumerate(talks):
            talk.prompt += talk.questions[turn]
            answers = _ask_both(urls, talk.prompt, sizes.answer_tokens)
            stock, banyan = answers["stock"]["output_ids"], answers["banyan"]["output_ids"]
            details = answers["banyan"]["meta_info"].get("cached_tokens_details")
            rows.append(
                {
                    "conversation": number,
                    "turn": turn,
                    "prompt_tokens": len(talk.prompt),
                    "is_as_stock_pair": stock == banyan,
                    "asked": list(talk.prompt),
                    "answer": banyan,
                    "answer_pages_before": num_answer_pages(talk.num_before, sizes.answer_tokens) if turn else 0,
                    "linker_pages": num_found_pages(details),
                    "details": details,
                }
            )
            talk.num_before = len(talk.prompt)
            talk.prompt = [*talk.prompt, *banyan]
    return rows


def _ask_both(urls: Mapping[str, str], prompt: Sequence[int], num_tokens: int) -> dict[str, dict[str, Any]]:
    """The same of each pair, at the same time."""

    def ask(url: str) -> dict[str, Any]:
        return Engine(url).generate(prompt, num_tokens=num_tokens)

    with ThreadPoolExecutor(len(urls)) as pool:
        return dict(zip(urls, pool.map(ask, urls.values()), strict=True))


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the conversations. A turn's share counts pages up to those that the answer before has."""
    expected = sum(row["answer_pages_before"] for row in rows)
    found = sum(min(row["linker_pages"], row["answer_pages_before"]) for row in rows)
    return {
        "pd_outputs_identical": all(row["is_as_alone"] for row in rows),
        "num_turns_compared": len(rows),
        "num_turns_identical": sum(row["is_as_alone"] for row in rows),
        "num_turns_as_stock_pair": sum(row["is_as_stock_pair"] for row in rows),
        "first_turns_as_stock_pair": all(row["is_as_stock_pair"] for row in rows if not row["turn"]),
        "next_turn_cached_share": round(found / expected, 4) if expected else None,
        "num_answer_pages": expected,
    }


@contextmanager
def both_pairs(
    model: Path, out: Path, *, prefill_pool_tokens: int, num_shards: int = 1
) -> Iterator[tuple[Pair, dict[str, str]]]:
    """The pair with Banyan, and the URLs of both, by kind."""
    store = out / "store"
    shutil.rmtree(store, ignore_errors=True)
    pools: dict[str, Any] = {
        "num_shards": num_shards,
        "prefill_args": ("--max-total-tokens", str(prefill_pool_tokens)),
        # Else a server without a radix cache reserves host memory for what it retracts, 10 GiB and more.
        "decode_args": (
            *("--max-total-tokens", str(DECODE_POOL_TOKENS)),
            *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        ),
    }
    moves = {**pools, "prefill_args": (*pools["prefill_args"], "--banyan-plan", "move")}
    banyan = Pair("banyan", "on", model, out / "logs", store=store, kind=ForkedServer, **moves)
    stock = Pair("stock", "off", model, out / "logs", kind=ForkedServer, **pools)
    with (
        banyan,
        stock,
        banyan.routed("--queue-timeout-s", str(START_TIMEOUT_S)) as banyan_url,
        stock.routed() as stock_url,
    ):
        yield banyan, {"banyan": banyan_url, "stock": stock_url}
    shutil.rmtree(store, ignore_errors=True)


def measure(model: Path, out: Path, sizes: Sizes, seed: int, *, is_quick: bool, num_shards: int = 1) -> dict[str, Any]:
    """Start everything, ask everything, stop everything."""
    talks = make_talks(model, sizes, seed)
    pool_tokens = sizes.prefill_pool_tokens
    with both_pairs(model, out, prefill_pool_tokens=pool_tokens, num_shards=num_shards) as (banyan, urls):
        rows = converse(talks, urls, sizes)
        found = pd_times.measure(urls, sizes.times, seed)
        found["handover_bytes_ratio"] = hand_over_ratio(banyan, urls["banyan"], model, sizes.hand_over_tokens, seed)
        found["idle_decode_locked_tokens"] = locked_when_idle(banyan)
        if not is_quick:
            found["decode_pool_whole"] = gets_whole_pool(urls["banyan"], seed)
        counters = {server.spec.label: banyan.states(server)[0] for server in banyan.servers}
        if not is_quick:
            found |= killed_decode(banyan, urls["banyan"], model, sizes.hand_over_tokens, seed)
            found["locked_tokens_after_kill"] = locked_when_idle(banyan)
    compare_with_alone(rows, model, out / "logs", num_shards)
    found = {**summarise(rows), **found}
    return {**found, "rows": rows, "counters": {label: _numbers(state) for label, state in counters.items()}}


def _numbers(state: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in state.items() if isinstance(value, int)}


def misses(found: Mapping[str, Any]) -> list[str]:
    """Figures that do not depend on time and are not what they should be."""
    marks = {
        "pd_outputs_identical": found["pd_outputs_identical"],
        "first_turns_as_stock_pair": found["first_turns_as_stock_pair"],
        "next_turn_cached_share": (found["next_turn_cached_share"] or 0) >= 0.97,
        "idle_decode_locked_tokens": found["idle_decode_locked_tokens"] == 0,
        "decode_pool_whole": found.get("decode_pool_whole", True),
        "handover_bytes_ratio": found["handover_bytes_ratio"] <= 0.10,
        "killed_decode_right": found.get("killed_decode_right", True),
        "locked_tokens_after_kill": not found.get("locked_tokens_after_kill", 0),
    }
    return [name for name, is_met in marks.items() if not is_met]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.pd", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two conversations of two turns: for CI")
    parser.add_argument(
        "--dual",
        nargs="*",
        choices=list(pd_dual.LIMITED),
        help="only what reading on both sides is worth, in these settings; none named: in all",
    )
    parser.add_argument("--times", action="store_true", help="only the times of prompts that nobody has seen")
    parser.add_argument("--slow", action="store_true", help="only what is seen of hand-overs over a slow network: root")
    parser.add_argument("--classes", action="store_true", help="only what a traffic class is worth: root")
    parser.add_argument("--no-networks", action="store_true", help="without what --slow and --classes measure")
    parser.add_argument("--conversations", type=int, metavar="N", help="instead of the usual number")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="shards of each server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/pd"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    if args.dual is not None:
        return _measure_dual(args)
    if args.slow:
        _add(args.out, pd_slow.measure(args.out, args.seed))
        return 0
    if args.classes:
        _add(args.out, pd_classes.measure(args.out))
        return 0
    sizes = QUICK if args.quick else Sizes()
    if args.conversations is not None:
        sizes = replace(sizes, num_conversations=args.conversations)
    # The other model's heads cannot be divided.
    model = ensure(LLAMA) if args.tp > 1 else ensure_model(DEFAULT_TARGET)
    if args.times:
        with both_pairs(model, args.out, prefill_pool_tokens=sizes.prefill_pool_tokens, num_shards=args.tp) as (
            _,
            urls,
        ):
            found = pd_times.measure(urls, sizes.times, args.seed)
        _add(args.out, found)
        _keep(args.out / "figures.json", found)
        return 0
    report = measure(model, args.out, sizes, args.seed, is_quick=args.quick, num_shards=args.tp)
    if not args.quick and not args.no_networks and own_network.is_possible():
        report |= {**pd_slow.measure(args.out, args.seed), **pd_classes.measure(args.out)}
    figures = {name: value for name, value in report.items() if name not in LONG_PARTS}
    write_report(args.out / "report.json", {**report, "sizes": asdict(sizes)}, args)
    # What docs/benchmarks/pd.json is a copy of.
    write_report(args.out / "figures.json", {**figures, "sizes": asdict(sizes)}, args)
    print(json.dumps(figures, indent=2))
    missed = misses(report)
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _add(out: Path, figures: Mapping[str, Any]) -> None:
    """Put these figures beside those of earlier runs, and show them."""
    _keep(out / "report.json", figures)
    print(json.dumps(figures, indent=2))


def _keep(path: Path, figures: Mapping[str, Any]) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **figures}, indent=1) + "\n")


def _measure_dual(args: argparse.Namespace) -> int:
    """Write what the dual path is worth beside what was found before in other settings, and add the figures to the
    report of the other runs, if there is one."""
    kept = args.out / "dual.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    model = ensure(LLAMA)
    for name in args.dual or list(pd_dual.LIMITED):
        if name == pd_agents.NAME:
            found[name] = pd_agents.measure(model, args.out, args.seed)
        else:
            found[name] = pd_dual.measure_setting(name, model, args.out, args.seed)
        kept.write_text(json.dumps(found, indent=1) + "\n")
    figures = pd_dual.figures(found)
    if pd_agents.NAME in found:
        figures |= pd_agents.figures(found[pd_agents.NAME])
    # What docs/benchmarks/pd_dual.json is a copy of.
    (args.out / "dual_figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    _add(args.out, figures)
    return 0 if figures.get("dual_outputs_identical", True) else 1


if __name__ == "__main__":
    sys.exit(main())
