# SPDX-License-Identifier: Apache-2.0
"""Prompts that nobody has seen, streamed: the time to the first token of a pair with Banyan, to that of one without.

    python -m benchmark.pd --times

Rounds in which the two pairs take turns, each with some prompts in a row, so that what one prompt leaves to be done
falls into the time of the next. The ratio is the median over rounds of the ratio of a round's medians.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmark.pd_checks import ttft_s
from benchmark.provenance import provenance
from benchmark.workload.generated import random_ids


@dataclass(frozen=True)
class Sizes:
    num_rounds: int = 5
    prompts_per_round: int = 8
    prompt_tokens: int = 400


def measure(urls: Mapping[str, str], sizes: Sizes, seed: int) -> dict[str, Any]:
    """Of the pairs ``banyan`` and ``stock``."""
    rng = random.Random(f"first-{seed}")
    medians: dict[str, list[float]] = {kind: [] for kind in urls}
    for kind in urls:
        # The first forwards of this size allocate: no lesson.
        for _ in range(2):
            ttft_s(urls[kind], random_ids(rng, sizes.prompt_tokens))
    for number in range(sizes.num_rounds):
        for kind in sorted(urls, reverse=number % 2 == 1):
            times = [ttft_s(urls[kind], random_ids(rng, sizes.prompt_tokens)) for _ in range(sizes.prompts_per_round)]
            medians[kind].append(statistics.median(times))
    return {**figures(medians), "times": {"sizes": asdict(sizes), "provenance": provenance()}}


def figures(medians: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    ratios = [banyan / stock for banyan, stock in zip(medians["banyan"], medians["stock"], strict=True)]
    return {
        "ttft_no_hit_ratio": round(statistics.median(ratios), 4),
        "ttft_no_hit_ratios": [round(ratio, 4) for ratio in ratios],
        "ttft_no_hit_s": {kind: [round(value, 4) for value in times] for kind, times in medians.items()},
    }
