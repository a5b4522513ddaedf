# SPDX-License-Identifier: Apache-2.0
"""Ways of serving that Banyan has not learnt: pure, one line for each, with the way out.

Each of them reads or writes KV pages at moments that the linker is not told of, or divides them in another way than a
page's key says. SGLang starts all of them with a linker; what came out would be wrong, or stand still, without a word.
"""

from __future__ import annotations

from dataclasses import dataclass

from banyan.refusals.rule import Rule, lines_of

OFF = "drop that flag or use --banyan-share off"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFacts:
    """How the server was asked to serve. Defaults are a mode that can share."""

    attn_cp_size: int = 1
    enable_prefill_cp: bool = False
    divides_kv: bool = False
    algorithm: str | None = None
    disaggregation_mode: str = "null"
    dcp_size: int = 1
    enable_pdmux: bool = False
    dllm_algorithm: str | None = None
    enable_return_routed_experts: bool = False
    enable_return_indexer_topk: bool = False
    enable_mis: bool = False
    enable_deterministic_inference: bool = False
    attention_backend: str | None = None
    enable_page_major_kv_layout: bool = False
    kv_canary: str = "none"
    elastic_ep_backend: str | None = None

    @property
    def is_context_parallel(self) -> bool:
        """Whether shards of a rank divide a prompt's tokens. SGLang puts what they have computed together before it
        writes KV: each has all of a page."""
        return self.attn_cp_size > 1 or self.enable_prefill_cp


_RULES: tuple[Rule[ModeFacts], ...] = (
    Rule(
        lambda f: f.divides_kv,
        lambda f: (
            "--enable-dsa-cache-layer-split, --enable-kv-cache-sharding: the shards of a context-parallel group hold "
            f"other parts of a page each: {OFF}"
        ),
    ),
    Rule(
        lambda f: f.is_context_parallel and f.algorithm is not None,
        lambda f: (
            f"--speculative-algorithm {f.algorithm} with --attn-cp-size or --enable-prefill-cp: whether each shard has "
            f"all rows of a draft is not known: {OFF}"
        ),
    ),
    Rule(
        lambda f: f.is_context_parallel and f.disaggregation_mode != "null",
        lambda f: (
            f"--disaggregation-mode {f.disaggregation_mode} with --attn-cp-size or --enable-prefill-cp: only one shard "
            f"of a context-parallel group hands pages over, and pairs know nothing of it: {OFF}"
        ),
    ),
    Rule(
        lambda f: f.dcp_size > 1,
        lambda f: f"--dcp-size {f.dcp_size}: a page is spread over the ranks that decode it: {OFF}",
    ),
    Rule(
        lambda f: f.enable_pdmux,
        lambda f: f"--enable-pdmux: a split prefill reads pages before they have come: {OFF}",
    ),
    Rule(
        lambda f: f.dllm_algorithm is not None,
        lambda f: (
            f"--dllm-algorithm {f.dllm_algorithm}: diffusion batches take promised pages and never fetch them: {OFF}"
        ),
    ),
    Rule(
        lambda f: f.enable_return_routed_experts,
        lambda f: (
            f"--enable-return-routed-experts: the experts of fetched tokens were never recorded on this rank: {OFF}"
        ),
    ),
    Rule(
        lambda f: f.enable_return_indexer_topk,
        lambda f: (
            f"--enable-return-indexer-topk: the choices of fetched tokens were never recorded on this rank: {OFF}"
        ),
    ),
    Rule(
        lambda f: f.enable_mis,
        lambda f: f"--enable-mis: SGLang keeps no radix cache for multi-item scoring, nothing could be shared: {OFF}",
    ),
    Rule(
        lambda f: f.enable_deterministic_inference and f.attention_backend == "flashinfer",
        lambda f: (
            "--enable-deterministic-inference with --attention-backend flashinfer: SGLang keeps no radix cache then, "
            "nothing could be shared: use --attention-backend fa3 or triton, or --banyan-share off"
        ),
    ),
    Rule(
        lambda f: f.enable_page_major_kv_layout,
        lambda f: (
            "--enable-page-major-kv-layout: Banyan lays the pool out layer by layer and would pass over that flag: "
            f"{OFF}"
        ),
    ),
    Rule(
        lambda f: f.kv_canary != "none",
        lambda f: (
            f"--kv-canary {f.kv_canary}: SGLang knows no canaries for Banyan's pools, and a fetched page brings none: "
            f"{OFF}"
        ),
    ),
    Rule(
        lambda f: f.elastic_ep_backend is not None,
        lambda f: (
            f"--elastic-ep-backend {f.elastic_ep_backend}: SGLang names pages by how many ranks take part, which "
            f"changes and is not known where a request is placed: {OFF}"
        ),
    ),
)


def mode_refusals(facts: ModeFacts) -> list[str]:
    """One line for each reason why sharing cannot start; empty when it can."""
    return lines_of(_RULES, facts)


def no_cache_refusal(*, asked: str, reason: str) -> str:
    """The line for a server whose radix cache SGLang has switched off while it resolved the flags.

    ``asked`` is the flag or the model that made it do so, as far as that is known.
    """
    return (
        f"{asked}: SGLang keeps no radix cache here, nothing could be shared: "
        f"use --banyan-share off or start without --enable-banyan (SGLang says: {reason})"
    )
