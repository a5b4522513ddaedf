# SPDX-License-Identifier: Apache-2.0
"""Models whose caches Banyan does not know, told from their configuration, before weights are loaded: pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model keeps for each token or request. Defaults are full attention alone."""

    architecture: str = ""
    is_generation: bool = True
    has_window: bool = False
    has_states: bool = False
    has_index_keys: bool = False
    has_compressed_kv: bool = False
    has_sparse_kv: bool = False


def model_refusal(facts: ModelFacts) -> str | None:
    """The line for a model that generates nothing or caches more than the KV of full attention, or None."""
    if not facts.is_generation:
        return (
            f"this model ({facts.architecture}) makes embeddings or rewards: those over fetched prefixes are not known "
            "to be those over computed ones yet: use --banyan-share off"
        )
    kept = [
        words
        for is_kept, words in (
            (facts.has_window, "sliding-window KV"),
            (facts.has_states, "state-space states"),
            (facts.has_index_keys, "index keys beside its KV"),
            (facts.has_compressed_kv, "compressed KV"),
            (facts.has_sparse_kv, "sparse KV"),
        )
        if is_kept
    ]
    if not kept:
        return None
    # A window's KV can be kept in full, in the ordinary pool; the others cannot.
    way_out = "use --banyan-share off"
    if kept == ["sliding-window KV"]:
        way_out = "use --disable-hybrid-swa-memory (which takes more memory), or --banyan-share off"
    return f"this model ({facts.architecture}) caches {' and '.join(kept)}; only full attention is shared: {way_out}"
