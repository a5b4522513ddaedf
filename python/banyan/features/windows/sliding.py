# SPDX-License-Identifier: Apache-2.0
"""What cannot be shared of a model that keeps its sliding windows apart: pure, one line for each, with the way out.

With ``--disable-hybrid-swa-memory`` SGLang keeps the windows' KV in full, in the ordinary pool: then the model is one
of full attention here.
"""

from __future__ import annotations

from dataclasses import dataclass

from banyan.feature import Asked
from banyan.refusals import MAX_SLOTS
from banyan.refusals.rule import Rule, lines_of
from banyan.store.location import asked_scheme

WAY_OUT = "use --disable-hybrid-swa-memory (which takes more memory)"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFacts:
    """What the decision depends on, of a model with sliding windows. Defaults are a server that can share them."""

    architecture: str = ""
    device: str = "cpu"
    has_sinks: bool = False
    algorithm: str | None = None
    """Of speculation."""
    disaggregation_mode: str = "null"
    steps_together: bool = False
    deals_with_nodes: bool = False
    keeps_arena: bool = False
    asked_store: str = ""
    """The scheme of a store that has to be asked what it holds."""
    num_slots: int = 8


_RULES: tuple[Rule[WindowFacts], ...] = (
    Rule(
        lambda f: f.device == "cpu" and f.has_sinks,
        lambda f: f"SGLang's attention sinks have no kernel for the CPU: {WAY_OUT}",
    ),
    Rule(
        lambda f: f.algorithm is not None,
        lambda f: (
            f"--speculative-algorithm {f.algorithm}: drafts of such a model are not verified over two pools yet: "
            f"drop that flag, or {WAY_OUT}"
        ),
    ),
    Rule(
        lambda f: f.disaggregation_mode != "null",
        lambda f: f"--disaggregation-mode {f.disaggregation_mode}: pairs hand over pages of one pool: {WAY_OUT}",
    ),
    Rule(
        lambda f: f.steps_together,
        lambda f: (
            "--enable-dp-attention, --attn-dp-size: ranks in step would wait for two pools' pages: "
            f"use --dp N alone, or {WAY_OUT}"
        ),
    ),
    Rule(
        lambda f: f.deals_with_nodes,
        lambda f: (
            f"--banyan-listen, --banyan-peers: other nodes are lent pages of one pool: drop those flags, or {WAY_OUT}"
        ),
    ),
    Rule(
        lambda f: f.keeps_arena,
        lambda f: f"--banyan-keep-host-arena: what is kept has pages of one pool: drop that flag, or {WAY_OUT}",
    ),
    Rule(
        lambda f: bool(f.asked_store),
        lambda f: (
            f"--banyan-store {f.asked_store}://: a store that has to be asked is asked for pages of one pool: "
            f"name a folder (file://, 3fs://), or {WAY_OUT}"
        ),
    ),
    Rule(
        lambda f: f.num_slots > MAX_SLOTS,
        lambda f: (
            f"--dp-size, --tp-size: with two pools each the ranks take {f.num_slots} places of {MAX_SLOTS}: "
            f"use fewer, or {WAY_OUT}"
        ),
    ),
)


def window_refusals(facts: WindowFacts) -> list[str]:
    """One line for each reason why the pages of this model cannot be shared."""
    model = f"this model ({facts.architecture}) keeps its sliding windows in a pool of their own"
    return [f"{model}; {line}, or --banyan-share off" for line in lines_of(_RULES, facts)]


def refusals(asked: Asked) -> list[str]:
    """Of a server as it was asked for."""
    model, config = asked.model, asked.config
    if model is None or not model.has_window:
        return []
    return window_refusals(
        WindowFacts(
            architecture=model.architecture,
            device=asked.device,
            has_sinks=model.has_sinks,
            algorithm=asked.algorithm,
            disaggregation_mode=asked.disaggregation_mode,
            steps_together=asked.steps_together,
            deals_with_nodes=config.deals_with_nodes,
            keeps_arena=bool(config.keep_host_arena),
            asked_store=asked_scheme(config),
            num_slots=8 if asked.layout is None else asked.layout.num_slots_with_windows,
        )
    )
