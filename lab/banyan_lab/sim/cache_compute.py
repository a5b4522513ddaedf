# SPDX-License-Identifier: Apache-2.0
"""DualPath's table of cache-compute ratios, computed from the architectures."""

from __future__ import annotations

from collections.abc import Iterator

from banyan_lab.sim.figures import DUALPATH, Figure, relative
from banyan_lab.sim.llms import cache_compute_ratio, llm

PUBLISHED = {
    "qwen2-5-32b": (117, 267),
    "gpt-oss-120b": (47, 95),
    "qwen3-235b-a22b": (39, 60),
    "deepseek-v3-2": (13, 36),
    "deepseek-v3": (4.8, 5.8),
}
CONTEXTS = (16_384, 65_536)
APPEND_TOKENS = 429
"""Of the 64K set; the source uses it in its example."""


def figures() -> Iterator[Figure]:
    for name, ends in PUBLISHED.items():
        model = llm(name)
        for context, published in zip(CONTEXTS, ends, strict=True):
            yield Figure(
                name=f"cache-compute ratio of {model.title} at {context // 1024}K",
                published=published,
                simulated=cache_compute_ratio(model, context_tokens=context, append_tokens=APPEND_TOKENS),
                unit="GB/PFLOP",
                source=f"{DUALPATH}, cache-compute ratio",
                within=relative(published, 0.12),
                note="656 B of latent a token and layer; the source may count more" if name == "deepseek-v3" else "",
            )
