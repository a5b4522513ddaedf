# SPDX-License-Identifier: Apache-2.0
"""What is played: recorded traces where a folder of them is named, generated ones of the same kinds where not. Pure
apart from reading the files.

Each workload draws its tokens with a seed of its own, so that no two have a page in common: what one left on a disk is
of no use to the next.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from banyan_lab.replay import Pace, Trace, TraceRequest
from benchmark import trace_replay
from benchmark.policy_table import TRACES as POLICY_TRACES
from benchmark.replay import Workload
from benchmark.replay_options import played, vocabulary_of, workload_of

VOCABULARY = "1000-48999"
SEED = 1
NUM_OUTPUT_TOKENS = 8
BLOCK_TOKENS = 16
QUICK_REQUESTS = 12


@dataclass(frozen=True, kw_only=True)
class Talk:
    """Sessions that grow from turn to turn behind a beginning that all share; lengths in blocks of 16 tokens."""

    num_sessions: int
    num_turns: int
    shared_blocks: int
    first_blocks: int
    turn_blocks: int
    gap_s: float
    think_s: float


@dataclass(frozen=True, kw_only=True)
class Library:
    """Long documents, each asked about many times by people who do not know of each other."""

    num_documents: int = 6
    num_questions: int = 24
    document_blocks: int = 96
    question_blocks: int = 2
    gap_s: float = 2.0
    """So that who knows no document is just overloaded, on two cores: faster, and none is computed before all are
    asked."""


GENERATED: Mapping[str, Talk] = MappingProxyType(
    {
        "conversations": Talk(
            num_sessions=12, num_turns=3, shared_blocks=2, first_blocks=24, turn_blocks=12, gap_s=0.8, think_s=1.0
        ),
        "coding_agents": Talk(
            num_sessions=4, num_turns=8, shared_blocks=40, first_blocks=16, turn_blocks=6, gap_s=1.5, think_s=0.3
        ),
        "tool_agents": Talk(
            num_sessions=12, num_turns=4, shared_blocks=48, first_blocks=4, turn_blocks=4, gap_s=1.0, think_s=0.2
        ),
    }
)

# Sessions that come back: of conversations none with one turn only, over an hour and not ten minutes. Coding agents are
# those of the policy tables, with more sessions over more time. Lengths shrink with their blocks, so that what is
# shared stays shared.
RECORDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "conversations": (
            *("--trace", "mooncake/conversation_trace.jsonl.gz", "--seed", str(SEED), "--window-seconds", "3600"),
            *("--sample-ratio", "0.02", "--max-single-turn-ratio", "0", "--token-scale", "0.0625"),
            *("--max-input-tokens", "2000", "--time-scale", "0.03"),
        ),
        "coding_agents": (*POLICY_TRACES["claude_code"], "--sample-ratio", "0.16", "--time-scale", "0.08"),
        "tool_agents": (
            *("--trace", "tau_bench/gpt-4o-airline.jsonl.gz", "--seed", str(SEED), "--sample-ratio", "0.05"),
            *("--token-scale", "0.25", "--max-input-tokens", "2000", "--num-requests", "40", "--time-scale", "0.04"),
        ),
    }
)
DOCUMENTS = "documents"
NAMES = (*GENERATED, DOCUMENTS)


def workloads_of(
    names: Sequence[str], data: Path | None, *, stretch: float, num_requests: int | None
) -> dict[str, Workload]:
    """The workloads by name. `stretch`: play over so many times the time; `num_requests`: at most, the earliest.

    Raises:
        ValueError: for a file that is not there or not a trace.
    """
    made = {}
    for name in names:
        recorded = data is not None and name in RECORDED
        trace, about = _recorded(name, data, num_requests) if recorded and data else _generated(name, num_requests)
        made[name] = _workload(name, trace, about, stretch)
    return made


def _recorded(name: str, data: Path, num_requests: int | None) -> tuple[Trace, dict[str, Any]]:
    options = [*RECORDED[name], "--max-output-tokens", str(NUM_OUTPUT_TOKENS), "--name", name]
    file = data / options[1]
    if not file.is_file():
        raise ValueError(f"--data {data}: no {options[1]} in it; without --data workloads are generated")
    options[1] = str(file)
    if num_requests is not None:
        options += ["--num-requests", str(num_requests)]
    workload = workload_of(trace_replay.build_parser().parse_args([*options, "describe"]))
    about = dict(workload.description) | {"source": file.name, "token_scale": workload.token_scale}
    return workload.trace, about


def _generated(name: str, num_requests: int | None) -> tuple[Trace, dict[str, Any]]:
    requests = (
        library_requests(Library(), seed=SEED) if name == DOCUMENTS else talk_requests(GENERATED[name], seed=SEED)
    )
    requests = sorted(requests, key=lambda request: request.at_s)
    trace = Trace(name, BLOCK_TOKENS, ()).of(requests[:num_requests])
    return trace, {"source": "generated", "token_scale": 1.0, "time_scale": 1.0, "played": played(trace)}


def _workload(name: str, trace: Trace, about: dict[str, Any], stretch: float) -> Workload:
    pace = Pace(time_scale=about["time_scale"] * stretch)
    return Workload.of(
        trace,
        pace,
        vocabulary_of(VOCABULARY),
        token_scale=about["token_scale"],
        seed=SEED + 1000 * (1 + NAMES.index(name)),
        description={**about, "time_scale": pace.time_scale},
    )


def talk_requests(talk: Talk, *, seed: int) -> list[TraceRequest]:
    """Turn t of a session asks the shared beginning, its own first blocks and t times its turn's blocks."""
    rng = random.Random(seed)
    requests = []
    start_s = 0.0
    for number in range(talk.num_sessions):
        own = talk.shared_blocks + number * (talk.first_blocks + talk.num_turns * talk.turn_blocks)
        for turn in range(talk.num_turns):
            num_own = talk.first_blocks + turn * talk.turn_blocks
            requests.append(
                _request(
                    f"s{number}",
                    turn,
                    start_s + turn * talk.think_s,
                    ((0, talk.shared_blocks), (own, num_own)),
                    think_s=talk.think_s if turn else None,
                )
            )
        start_s += rng.expovariate(1 / talk.gap_s)
    return requests


def library_requests(library: Library, *, seed: int) -> list[TraceRequest]:
    """Every document as often, in a drawn order; each question is a session of its own."""
    rng = random.Random(seed)
    asked = [number % library.num_documents for number in range(library.num_questions)]
    rng.shuffle(asked)
    requests = []
    start_s = 0.0
    questions = library.num_documents * library.document_blocks
    for number, document in enumerate(asked):
        blocks = (
            (document * library.document_blocks, library.document_blocks),
            (questions + number * library.question_blocks, library.question_blocks),
        )
        requests.append(_request(f"q{number}", 0, start_s, blocks, think_s=None))
        start_s += rng.expovariate(1 / library.gap_s)
    return requests


def _request(
    session: str, turn: int, at_s: float, blocks: tuple[tuple[int, int], ...], *, think_s: float | None
) -> TraceRequest:
    return TraceRequest(
        session=session,
        turn=turn,
        at_s=at_s,
        num_input_tokens=sum(count for _, count in blocks) * BLOCK_TOKENS,
        num_output_tokens=NUM_OUTPUT_TOKENS,
        blocks=blocks,
        think_s=think_s,
    )


def distinct_pages(prompts: Sequence[Sequence[int]], page_tokens: int) -> int:
    """Full pages of the prompts, each beginning counted once: what a cache that keeps everything would hold."""
    seen = set()
    for prompt in prompts:
        name = 0
        for first in range(0, len(prompt) - page_tokens + 1, page_tokens):
            name = hash((name, *prompt[first : first + page_tokens]))
            seen.add(name)
    return len(seen)


def alone_prompts(num_prompts: int) -> list[list[int]]:
    """Prompts to be asked one at a time, of different lengths and without a common page."""
    rng = random.Random(SEED)
    return [[1000 + rng.randrange(40_000) for _ in range(300 + 90 * number)] for number in range(num_prompts)]
