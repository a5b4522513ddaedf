# SPDX-License-Identifier: Apache-2.0
"""The options of a replay, and the workload that they describe."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from banyan_lab.replay import Pace, Sampling, Scale, Skew, Trace, Vocabulary, load, sampled, scaled, skewed_trace
from banyan_lab.replay.formats import LOADERS
from benchmark.replay import Workload

SKEWED = "skewed"


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Trace, sampling, scale and pace."""
    what = parser.add_argument_group("trace")
    what.add_argument("--trace", required=True, help=f"file (.jsonl, .csv, .gz), or `{SKEWED}` for a generated one")
    what.add_argument("--format", choices=sorted(LOADERS), help="default: what the first line looks like")
    what.add_argument("--name", help="what results call it; default: the file's name")
    part = parser.add_argument_group("sample")
    part.add_argument("--window-seconds", type=float, metavar="S", help="a contiguous window; default: all")
    part.add_argument("--window-start", type=float, metavar="S", help="default: drawn with the seed")
    part.add_argument(
        "--sample-ratio", type=float, default=1.0, help="part of the window's sessions to keep, whole ones"
    )
    part.add_argument("--max-single-turn-ratio", type=float, default=1.0, help="sessions of one turn, at most")
    part.add_argument("--num-requests", type=int, help="at most, the earliest ones")
    part.add_argument("--seed", type=int, default=0)
    size = parser.add_argument_group("scale")
    size.add_argument(
        "--token-scale", type=float, default=1.0, help="factor of prompt lengths; blocks shrink with them"
    )
    size.add_argument("--output-scale", type=float, default=1.0, help="factor of answer lengths")
    size.add_argument("--max-input-tokens", type=int, help="end a session before a longer prompt")
    size.add_argument("--max-output-tokens", type=int)
    size.add_argument("--vocabulary", default="1000-48999", metavar="FIRST-LAST", help="token ids to draw prompts from")
    pace = parser.add_argument_group("pace")
    pace.add_argument("--time-scale", type=float, default=1.0, help="replayed seconds for each recorded one")
    pace.add_argument("--max-inflight-sessions", type=int, help="default: no limit, the arrivals decide")


def workload_of(args: argparse.Namespace) -> Workload:
    """What will be played, and what cutting and scaling did to it.

    Raises:
        ValueError: (TraceError among them) naming the option or the line.
    """
    wanted = Sampling(
        window_s=args.window_seconds,
        start_s=args.window_start,
        sample_ratio=args.sample_ratio,
        max_single_turn_ratio=args.max_single_turn_ratio,
        num_requests=args.num_requests,
        seed=args.seed,
    )
    scale = Scale(
        tokens=args.token_scale,
        output_tokens=args.output_scale,
        max_input_tokens=args.max_input_tokens,
        max_output_tokens=args.max_output_tokens,
    )
    pace = Pace(time_scale=args.time_scale, max_inflight_sessions=args.max_inflight_sessions)
    sample, sample_report = sampled(_trace(args), wanted)
    small, factor, num_too_long = scaled(sample, scale)
    description = {
        "trace": args.name or small.name,
        **asdict(wanted),
        **{f"scale_{name}": value for name, value in asdict(scale).items()},
        **asdict(pace),
        "sample": asdict(sample_report) | {"survived_ratio": sample_report.survived_ratio},
        "token_scale_used": factor,
        "num_too_long": num_too_long,
        "played": played(small),
    }
    return Workload.of(
        small, pace, vocabulary_of(args.vocabulary), token_scale=factor, seed=args.seed, description=description
    )


def played(trace: Trace) -> dict[str, Any]:
    """Size of a trace as it is played."""
    return {
        "num_requests": len(trace.requests),
        "num_sessions": len(trace.sessions()),
        "span_s": round(trace.span_s, 3),
        "num_input_tokens": sum(request.num_input_tokens for request in trace.requests),
        "num_output_tokens": sum(request.num_output_tokens for request in trace.requests),
        "block_tokens": trace.block_tokens,
    }


def vocabulary_of(text: str) -> Vocabulary:
    """From `FIRST-LAST`. Raises ValueError."""
    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit()):
        raise ValueError(f"--vocabulary {text}: two token ids, FIRST-LAST")
    return Vocabulary(int(first), int(last))


def _trace(args: argparse.Namespace) -> Trace:
    if args.trace == SKEWED:
        return skewed_trace(Skew(), seed=args.seed)
    return load(Path(args.trace), args.format)
