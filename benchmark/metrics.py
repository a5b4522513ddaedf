# SPDX-License-Identifier: Apache-2.0
"""The figures of one run, and what several repetitions of it say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmark.records import CACHE_SOURCES, Answer, Record

QUANTILES = {"p50": 50, "p90": 90, "p99": 99}


def distribution(values: Iterable[float], *, scale: float = 1.0) -> dict[str, float] | None:
    """Mean, p50, p90 and p99 (linear between ranks), min and max of `values` times `scale`; None without
    values."""
    array = np.asarray(list(values), dtype=float) * scale
    if array.size == 0:
        return None
    figures = {"mean": float(array.mean()), "min": float(array.min()), "max": float(array.max())}
    figures.update({name: float(np.percentile(array, rank)) for name, rank in QUANTILES.items()})
    return {name: round(value, 6) for name, value in figures.items()}


def summarise(records: Sequence[Record], *, total_time_s: float) -> dict[str, Any]:
    """All figures of one run. Failed requests are counted and listed; times and tokens are of the others."""
    done = [record for record in records if not record.answer.error]
    answers = [record.answer for record in done]
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    cached_tokens = sum(answer.cached_tokens for answer in answers)
    return {
        "num_requests": len(records),
        "num_completed": len(done),
        "num_errors": len(records) - len(done),
        "errors": [f"{record.key}: {record.answer.error}" for record in records if record.answer.error][:10],
        "total_time_s": round(total_time_s, 3),
        "completed_per_s": round(len(done) / total_time_s, 4) if total_time_s > 0 else None,
        "nominal_tokens": sum(record.nominal_prompt_tokens + record.output_len for record in records),
        "served_tokens": prompt_tokens + sum(answer.completion_tokens for answer in answers),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sum(answer.completion_tokens for answer in answers),
        "cached_tokens": cached_tokens,
        "cached_share": round(cached_tokens / prompt_tokens, 5) if prompt_tokens else None,
        "cached_by_source": cached_by_source(record.answer for record in done),
        "by_rank": by_rank(done),
        "ttft_s": distribution(answer.ttft_s for answer in answers if answer.ttft_s is not None),
        "latency_s": distribution(answer.latency_s for answer in answers),
        # Prompt tokens in the denominator, as the ShareGPT scripts of serving engines have it.
        "latency_per_token_ms": distribution(
            (
                answer.latency_s / (answer.prompt_tokens + answer.completion_tokens)
                for answer in answers
                if answer.prompt_tokens + answer.completion_tokens
            ),
            scale=1e3,
        ),
        "time_per_output_token_ms": distribution(
            (
                (answer.latency_s - answer.ttft_s) / (answer.completion_tokens - 1)
                for answer in answers
                if answer.ttft_s is not None and answer.completion_tokens > 1
            ),
            scale=1e3,
        ),
        "inter_token_latency_ms": distribution((gap_s for answer in answers for gap_s in answer.itl_s), scale=1e3),
    }


def cached_by_source(answers: Iterable[Answer]) -> dict[str, int]:
    """Cached tokens per place they came from; `untold` is what a server reported without a place."""
    totals = dict.fromkeys((*CACHE_SOURCES, "untold"), 0)
    for answer in answers:
        details = answer.cached_tokens_details
        for source, num_tokens in details.items():
            totals[source] += num_tokens
        totals["untold"] += max(0, answer.cached_tokens - sum(details.values()))
    return totals


def by_rank(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    """Requests, prompt and cached tokens of every data-parallel rank; rank `untold` where the server is
    silent."""
    ranks: dict[str, dict[str, int]] = {}
    for record in records:
        rank = "untold" if record.answer.dp_rank is None else str(record.answer.dp_rank)
        figures = ranks.setdefault(rank, {"num_requests": 0, "prompt_tokens": 0, "cached_tokens": 0})
        figures["num_requests"] += 1
        figures["prompt_tokens"] += record.answer.prompt_tokens
        figures["cached_tokens"] += record.answer.cached_tokens
    return dict(sorted(ranks.items()))


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median of repetitions with the smallest and largest of them, and the values themselves."""
    if not values:
        return None
    return {"median": median(values), "min": min(values), "max": max(values), "values": list(values)}


def median_of(found: Mapping[str, Any] | None) -> float | None:
    """Of a `spread`, which None stands for where nothing was measured."""
    return None if found is None else float(found["median"])


def ranged(found: Mapping[str, Any]) -> str:
    """A `spread` in words."""
    return f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any] | None:
    """Ratio within each repetition, then the spread of these: what drifts between repetitions cancels."""
    return spread([top / bottom for top, bottom in zip(numerators, denominators, strict=True) if bottom])
