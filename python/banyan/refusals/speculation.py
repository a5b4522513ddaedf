# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: which drafts are shared with the pages of their model, and which are not: pure."""

from __future__ import annotations

from dataclasses import dataclass

SHARED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Drafts whose KV lies at the model's own slots. SGLang calls multi-token prediction NEXTN, and runs it as EAGLE."""

WITHOUT_KV = ("NGRAM", "FROZEN_KV_MTP")
"""Drafts that have no KV: n-grams, and a draft that reads the model's (SGLang runs NEXTN of Gemma 4 so). Pages enter
the tree once their tokens are verified."""

OF_THE_MODEL = ("EAGLE", "NEXTN")
"""Drafts that may have a layer for each step: further layers of the model (multi-token prediction)."""

OFF = "drop that flag or use --banyan-share off"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """How a server speculates. Defaults: not at all."""

    algorithm: str | None = None
    has_layers_of_steps: bool = False
    disaggregation_mode: str = "null"
    skips_draft_extend: bool = False


def draft_refusals(facts: DraftFacts) -> list[str]:
    """One line for each reason why the drafts of a server cannot be shared; empty when they can, or there are none."""
    if facts.algorithm is None or facts.algorithm.upper() in WITHOUT_KV:
        return []
    flag = f"--speculative-algorithm {facts.algorithm}"
    if facts.algorithm.upper() not in SHARED:
        return [f"{flag}: only drafts of {', '.join(SHARED)}, and those without KV, are shared with their pages: {OFF}"]
    lines = []
    if facts.has_layers_of_steps and facts.algorithm.upper() not in OF_THE_MODEL:
        lines.append(layers_of_steps_refusal(flag))
    if facts.disaggregation_mode != "null":
        lines.append(f"{flag} with --disaggregation-mode {facts.disaggregation_mode}: pairs share no drafts: {OFF}")
    if facts.skips_draft_extend:
        lines.append(
            "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND: pages would be complete whose draft rows were never written: "
            "unset it"
        )
    return lines


def layers_of_steps_refusal(found: str) -> str:
    """The line for a draft with a layer for each step that is not made of further layers of the model: SGLang hands a
    linker several pools of no other draft. ``found``: whose draft it is."""
    return f"--enable-multi-layer-eagle with {found}: only layers of the model's own are shared with its pages: {OFF}"


IN_PAGES_OF_ONE = ("fa3", "fa4")
"""Attention backends that verify drafts with branches over sliding windows in pages of one token only."""


def branches_refusal(*, num_branches: int, attention: str | None, page_tokens: int) -> str | None:
    """The line for drafts of a model with sliding windows that cannot be verified, shared or not; or None."""
    if num_branches == 1 or attention not in IN_PAGES_OF_ONE or page_tokens == 1:
        return None
    return (
        f"--speculative-eagle-topk {num_branches}: over sliding windows --attention-backend {attention} verifies "
        f"drafts with branches in pages of one token only, and these are of {page_tokens}: use "
        "--speculative-eagle-topk 1, or --banyan-share off without --page-size"
    )


def draft_division_refusal(*, num_draft_shards: int, num_shards: int) -> str | None:
    """The line for a draft whose attention is divided among other processes than the model's, or None: the same shard
    of another rank would have other heads of it."""
    if num_draft_shards == num_shards:
        return None
    return (
        f"SGLang divides the draft's attention over {num_draft_shards} process(es) and the model's over {num_shards}: "
        "drop --speculative-algorithm or use --banyan-share off"
    )


def draft_pool_refusal(found: str) -> str:
    """The line for a draft whose KV does not lie at the model's slots."""
    return (
        f"the draft's KV pool cannot travel with the model's ({found}): "
        "drop --speculative-algorithm or use --banyan-share off"
    )
