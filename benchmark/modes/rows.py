# SPDX-License-Identifier: Apache-2.0
"""The modes in which SGLang can be run, and what Banyan does in each: the one list behind `make modes`.

A row is served (with the outputs of a server that shares nothing), refused (with one line), or needs something that
this harness does not have; then the row says what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["served", "refused", "needs"]
Answer = Literal[
    "tokens",
    "adapter tokens",
    "drafted tokens",
    "tokens of a grammar",
    "vectors",
    "tokens by gRPC",
    "tokens of a program",
    "tokens of a pair",
    "tokens about a picture",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One row. `num_ranks`: ranks that a request can name; `flags` hold what makes so many of them."""

    name: str
    flags: tuple[str, ...]
    verdict: Verdict
    model: Literal["llama", "moe", "mla", "mtp", "mla-mtp", "window", "state", "vision"] = "llama"
    num_ranks: int = 2
    answer: Answer = "tokens"
    env: tuple[tuple[str, str], ...] = ()
    alone: tuple[str, ...] | None = None
    """Flags of the server that it is compared with, which shares nothing; None: `flags` themselves."""
    pool_tokens: int = 8000
    gives_memory: bool = False
    """Both servers give their memory back and take it again, as for a trainer, before they are asked."""
    restarted: bool = False
    """Asked again by a second server on what the first one has stored."""
    needs: str = ""
    source: Literal["peer", "host", "storage"] = "peer"
    """Where cached tokens must have come from, among others."""

    def __post_init__(self) -> None:
        if (self.verdict == "needs") != bool(self.needs):
            raise ValueError(f"{self.name}: what is needed is said by rows that need something, and by no others")


ONE_RANK = ("--dp", "1")
IN_STEP = ("--tp", "2", "--dp", "2", "--enable-dp-attention")
IN_STEP_TOO = ("--tp", "2", "--attn-dp-size", "2")
STORE = "{folder}/store"
PORT = "{port}"
"""The harness puts a folder of the row in its place; so too for a free port, the adapter, the model and its draft."""
ADAPTER, MODEL, DRAFT, DRAFT_OF_LAYERS = "{adapter}", "{model}", "{draft}", "{draft-of-layers}"
LORA = ("--enable-lora", "--lora-paths", f"tiny={ADAPTER}", "--lora-backend", "torch_native")
GPU = "a GPU"
TWO_GPUS_TOLD = (
    ("RAY_ADDRESS", "local"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
    ("RAY_OVERRIDE_RESOURCES", '{"GPU":2}'),
)
"""Ray gives each rank a GPU, and believes that there are some."""
GRPC = ("--smg-grpc-mode", "--skip-server-warmup", "--load-balance-method", "round_robin", "--enable-metrics")
NO_WARM_UP = (("SMG_SGLANG_SERVICER_WARMUP", "off"),)
"""They would ask with ids that a tiny model does not have, and for a hundred prompts."""
NGRAMS = ("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1")
"""Chains of drafts: SGLang verifies trees in pages of several tokens with one backend only, which is not the CPU's."""


NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer")
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
"""Chains for the same reason."""
STANDALONE = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", MODEL, *CHAIN)
EAGLE = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", DRAFT, *CHAIN)
EAGLE3 = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", DRAFT_OF_LAYERS, *CHAIN)
NEXTN = ("--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", MODEL, *CHAIN)
EAGLE_OF_ITSELF = ("--speculative-algorithm", "EAGLE", *CHAIN)
"""As the published lines have it: SGLang takes the next layer of the model itself."""
IN_PYTHON = (("TORCHDYNAMO_DISABLE", "1"),)
"""SGLang compiles a step of drafting at the first request, for seconds."""


DRAFTED: dict[str, object] = {"env": IN_PYTHON, "answer": "drafted tokens"}


def _drafting() -> tuple[Mode, ...]:
    def row(name: str, *flags: str, **other: object) -> Mode:
        own = {**DRAFTED, **other}
        return Mode(name=name, flags=flags, verdict="served", **own)  # type: ignore[arg-type]

    return (
        row("drafts of a small model (standalone)", "--dp", "2", *STANDALONE, alone=(*ONE_RANK, *STANDALONE)),
        row("drafts from the model's states (EAGLE)", "--dp", "2", *EAGLE, alone=(*ONE_RANK, *EAGLE)),
        row("drafts from states of several layers (EAGLE3)", "--dp", "2", *EAGLE3, alone=(*ONE_RANK, *EAGLE3)),
        row("drafts of ranks of two shards", "--tp", "2", "--dp", "2", *EAGLE, alone=("--tp", "2", *ONE_RANK, *EAGLE)),
        row("multi-token prediction", "--dp", "2", *NEXTN, alone=(*ONE_RANK, *NEXTN), model="mtp"),
        row("multi-token prediction of ranks in step (NEXTN)", *IN_STEP_TOO, *NEXTN, model="mla-mtp"),
        row("multi-token prediction of ranks in step (EAGLE)", *IN_STEP, *EAGLE_OF_ITSELF, model="mla-mtp"),
        row("drafts of ranks in step from states of several layers (EAGLE3)", *IN_STEP_TOO, *EAGLE3, model="moe"),
        row(
            "drafts through the host arena",
            *("--dp", "2", *STANDALONE, "--banyan-host-gb", "0.25"),
            alone=(*ONE_RANK, *STANDALONE),
            pool_tokens=900,
            source="host",
        ),
        row(
            "drafts in the store, after a restart",
            *("--dp", "2", *EAGLE, "--banyan-host-gb", "0.25"),
            *("--banyan-store", STORE, "--banyan-store-admit", "first"),
            alone=(*ONE_RANK, *EAGLE),
            restarted=True,
            source="storage",
        ),
    )


def _windowed() -> tuple[Mode, ...]:
    def row(name: str, *flags: str, **other: object) -> Mode:
        return Mode(name=name, flags=flags, verdict="served", model="window", **other)  # type: ignore[arg-type]

    two, chunks = ("--dp", "2"), ("--chunked-prefill-size", "128")
    return (
        row("sliding windows", *two, alone=ONE_RANK),
        row("sliding windows, prefills in chunks", *two, *chunks, alone=(*ONE_RANK, *chunks)),
        row("sliding windows of ranks of two shards", "--tp", "2", *two, alone=("--tp", "2", *ONE_RANK)),
        row(
            "sliding windows through the host arena",
            *(*two, "--banyan-host-gb", "0.25"),
            alone=ONE_RANK,
            pool_tokens=900,
            source="host",
        ),
        row(
            "sliding windows in the store, after a restart",
            *(*two, "--banyan-host-gb", "0.25", "--banyan-store", STORE, "--banyan-store-admit", "first"),
            alone=ONE_RANK,
            restarted=True,
            source="storage",
        ),
        row(
            "sliding windows kept in full",
            *(*two, "--disable-hybrid-swa-memory"),
            alone=(*ONE_RANK, "--disable-hybrid-swa-memory"),
        ),
        row("sliding windows of ranks in step", *IN_STEP_TOO),
        row("sliding windows with drafts from n-grams", *two, *NGRAMS, alone=(*ONE_RANK, *NGRAMS)),
        row("sliding windows with drafts (EAGLE)", *two, *EAGLE, alone=(*ONE_RANK, *EAGLE), **DRAFTED),
        row(
            "sliding windows with drafts through the host arena (EAGLE3)",
            *(*two, *EAGLE3, "--banyan-host-gb", "0.25"),
            alone=(*ONE_RANK, *EAGLE3),
            pool_tokens=900,
            source="host",
            **DRAFTED,
        ),
        row("sliding windows of ranks in step with drafts (EAGLE3)", *IN_STEP_TOO, *EAGLE3, **DRAFTED),
    )


FEW_STATES = ("--max-mamba-cache-size", "60")
"""SGLang gives states the larger part of the memory that it finds, and the arena is divided as the pools are."""


def _stateful() -> tuple[Mode, ...]:
    def row(name: str, *flags: str, alone: tuple[str, ...] = (), **other: object) -> Mode:
        """``alone``: flags of the server of one rank, besides."""
        own = {"model": "state", "alone": (*ONE_RANK, *FEW_STATES, *alone), **other}
        return Mode(name=name, flags=("--dp", "2", *FEW_STATES, *flags), verdict="served", **own)  # type: ignore[arg-type]

    chunks, shards, arena = ("--chunked-prefill-size", "128"), ("--tp", "2"), ("--banyan-host-gb", "0.25")
    return (
        row("state space"),
        row("state space, prefills in chunks", *chunks, alone=chunks),
        row("state space of ranks of two shards", *shards, alone=shards),
        Mode(
            name="state space of ranks in step",
            flags=(*IN_STEP_TOO, *FEW_STATES),
            verdict="served",
            model="state",
        ),
        row("state space through the host arena", *arena, pool_tokens=900, source="host"),
        row(
            "state space in the store, after a restart",
            *(*arena, "--banyan-store", STORE, "--banyan-store-admit", "first"),
            restarted=True,
            source="storage",
        ),
    )


def _paired() -> tuple[Mode, ...]:
    def row(name: str, *flags: str, transfer: str = "nixl", **other: object) -> Mode:
        own = ("--disaggregation-transfer-backend", transfer, "--banyan-store", STORE)
        return Mode(
            name=name,
            flags=(*flags, *own),
            verdict="served",
            num_ranks=1,
            answer="tokens of a pair",
            alone=(*ONE_RANK, *flags),
            pool_tokens=900,
            source="host",
            **other,  # type: ignore[arg-type]
        )

    return (
        row("prefill/decode pairs"),
        row("prefill/decode pairs of two shards", "--tp", "2"),
        # Without its last flag SGLang's decode servers exchange logits in a way that gloo does not know.
        row("prefill/decode pairs of ranks in step", *IN_STEP_TOO, "--enable-dp-lm-head", model="moe"),
        row("prefill/decode pairs by Mooncake", transfer="mooncake"),
        row("prefill/decode pairs by Mooncake, of two shards", "--tp", "2", transfer="mooncake"),
    )


SAVER = "--enable-memory-saver"
VERL = (SAVER, "--skip-tokenizer-init", "--skip-server-warmup", "--trust-remote-code", "--log-level", "error")
SLIME = (SAVER, "--enable-draft-weights-cpu-backup", "--skip-server-warmup", "--trust-remote-code")
"""Without what says where a server lies and how large it is, and without what only a GPU has: verl's attention (fa3),
and slime's ways to fetch weights from another server."""


def _trained() -> tuple[Mode, ...]:
    """Servers whose weights a trainer changes."""

    def row(name: str, *flags: str, **other: object) -> Mode:
        own = {"gives_memory": True, "alone": (*ONE_RANK, *flags), **other}
        return Mode(name=name, flags=("--dp", "2", *flags), verdict="served", **own)  # type: ignore[arg-type]

    in_step: dict[str, object] = {"verdict": "served", "model": "moe", "gives_memory": True}
    return (
        row("memory given back and taken again", SAVER),
        row("as verl starts it beside a trainer", *VERL, "--enable-weights-cpu-backup", "--enable-metrics"),
        row("as verl starts it within a trainer", *VERL, "--load-format", "dummy"),
        Mode(name="as verl starts it, ranks in step", flags=(*IN_STEP, *VERL), **in_step),  # type: ignore[arg-type]
        row("as slime starts it", *SLIME, "--random-seed", "1234"),
        Mode(name="as slime starts it, ranks in step", flags=(*IN_STEP, *SLIME), **in_step),  # type: ignore[arg-type]
    )


IN_ACTORS = Mode(
    name="Ray actors of a rank of two shards, through the host arena",
    flags=("--tp", "2", "--use-ray", "--banyan-host-gb", "0.25"),
    verdict="served",
    num_ranks=1,
    alone=("--tp", "2"),
    env=TWO_GPUS_TOLD,
    pool_tokens=700,
    source="host",
)


def _served() -> tuple[Mode, ...]:
    def row(name: str, *flags: str, **other: object) -> Mode:
        return Mode(name=name, flags=flags, verdict="served", **other)  # type: ignore[arg-type]

    def replicas(name: str, *flags: str, num_ranks: int = 2, **other: object) -> Mode:
        dp = ("--dp", str(num_ranks))
        return row(name, *dp, *flags, num_ranks=num_ranks, alone=(*ONE_RANK, *flags), **other)

    return (
        replicas("replicas"),
        replicas("4 replicas", num_ranks=4),
        replicas("8 replicas", num_ranks=8),
        row("tensor parallelism within a rank", "--tp", "2", "--dp", "2", alone=("--tp", "2", *ONE_RANK)),
        row("data-parallel attention", *IN_STEP, model="moe"),
        row("data-parallel attention, new spelling", *IN_STEP_TOO, model="moe"),
        replicas("latent attention (MLA)", model="mla"),
        row("latent attention, data-parallel", *IN_STEP_TOO, model="mla"),
        replicas("mixture of experts", model="moe"),
        replicas("fp16", "--dtype", "float16"),
        replicas("fp8 KV", "--kv-cache-dtype", "fp8_e4m3"),
        replicas("pages of 32 tokens", "--page-size", "32"),
        replicas("pages of 64 tokens", "--page-size", "64"),
        replicas("LoRA", *LORA, answer="adapter tokens"),
        row(
            "LoRA in the store, after a restart",
            *("--dp", "2", *LORA, "--banyan-host-gb", "0.25", "--banyan-store", STORE, "--banyan-store-admit", "first"),
            alone=(*ONE_RANK, *LORA),
            restarted=True,
            source="storage",
            answer="adapter tokens",
        ),
        replicas("images", model="vision", answer="tokens about a picture"),
        row(
            "images in the store, after a restart",
            *("--dp", "2", "--banyan-host-gb", "0.25", "--banyan-store", STORE, "--banyan-store-admit", "first"),
            alone=ONE_RANK,
            model="vision",
            restarted=True,
            source="storage",
            answer="tokens about a picture",
        ),
        replicas("speculation from n-grams", *NGRAMS),
        *_drafting(),
        *_windowed(),
        *_stateful(),
        *_paired(),
        *_trained(),
        replicas("embedding models", "--is-embedding", answer="vectors"),
        row("host arena", "--dp", "2", "--banyan-host-gb", "0.25", alone=ONE_RANK, pool_tokens=700, source="host"),
        row(
            "store, after a restart",
            *("--dp", "2", "--banyan-host-gb", "0.25", "--banyan-store", STORE, "--banyan-store-admit", "first"),
            alone=ONE_RANK,
            restarted=True,
            source="storage",
        ),
        replicas("a program with SGLang's Engine", answer="tokens of a program"),
        replicas("no overlap of scheduler and forward", "--disable-overlap-schedule"),
        replicas("priorities", "--enable-priority-scheduling"),
        replicas("longest prefix first", "--schedule-policy", "lpm"),
        replicas("mixed chunks", "--enable-mixed-chunk", "--chunked-prefill-size", "128"),
        replicas("structured output", answer="tokens of a grammar"),
        replicas("pages leave by how often they were used", "--radix-eviction-policy", "lfu"),
        replicas("several tokenizer workers", "--tokenizer-worker-num", "2"),
        IN_ACTORS,
        replicas("gRPC beside HTTP", "--grpc-port", PORT),
        replicas("gRPC in place of HTTP", *GRPC, answer="tokens by gRPC", env=NO_WARM_UP),
    )


def _refused() -> tuple[Mode, ...]:
    def row(name: str, *flags: str, **other: object) -> Mode:
        return Mode(name=name, flags=flags, verdict="refused", **other)  # type: ignore[arg-type]

    two = ("--dp", "2")
    return (
        row("pipeline parallelism", *two, "--pp-size", "2"),
        row("replicas on several nodes", *two, "--nnodes", "2", "--dist-init-addr", "127.0.0.1:29999"),
        row("more than 64 member slots", "--tp", "4", "--dp", "16", "--banyan-host-gb", "1"),
        row("data-parallel attention of a dense Llama", *IN_STEP_TOO),
        row(
            "context-parallel prefills with a divided cache",
            *("--tp", "2", "--attn-cp-size", "2", "--enable-dsa-cache-layer-split"),
        ),
        row("context-parallel decode", "--tp", "2", "--dcp-size", "2"),
        row("pages of one token", *two, "--page-size", "1"),
        row(
            "several tokenizer workers of another application",
            *(*two, "--tokenizer-worker-num", "2"),
            env=(("SGLANG_HTTP_SERVER_APP_PATH", "other:app"),),
        ),
        row("Ray actors of several ranks", *two, "--use-ray", env=TWO_GPUS_TOLD),
        row("Rust server", *two, env=(("SGLANG_RUST_SERVER", "1"),)),
        row("gRPC by the Rust servicer", *two, *GRPC, "--servicer-impl", "rust"),
        row("no radix cache", *two, "--disable-radix-cache"),
        row("HiCache", *two, "--enable-hierarchical-cache"),
        row("LMCache", *two, "--enable-lmcache"),
        row("FlexKV", *two, "--enable-flexkv"),
        row("another radix cache", *two, "--radix-cache-backend", "cpp"),
        row("another external linker", *two, "--enable-unified-cache-external-linker"),
        row("unified memory", *two, "--enable-unified-memory"),
        row("page-major layout", *two, "--enable-page-major-kv-layout"),
        row(
            "prefill/decode pairs over another transfer",
            *(*two, "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mori"),
        ),
        row("drafts of another kind", *two, "--speculative-algorithm", "DFLASH"),
        row("drafts with a layer for each step", *two, *EAGLE, "--enable-multi-layer-eagle"),
        row("drafts of ranks in step with a divided vocabulary", *IN_STEP_TOO, *EAGLE, model="moe"),
        row(
            "drafts of prefill/decode pairs",
            *(*two, *EAGLE, "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"),
        ),
        row("state space with drafts", *two, *NGRAMS, model="state"),
        row("state space without states at the ends of pages", *two, *NO_BUFFER, model="state"),
        row("diffusion LLMs", *two, "--dllm-algorithm", "LowConfidence"),
        row("PD multiplexing", *two, "--enable-pdmux"),
        row("returned routed experts", *two, "--enable-return-routed-experts"),
        row("as slime starts it, to replay the routing", *two, *SLIME, "--enable-return-routed-experts"),
        row(
            "weights that are not those of the model's files, and a store",
            *(*two, "--load-format", "dummy", "--banyan-host-gb", "0.25", "--banyan-store", STORE),
        ),
        row("returned choices of an indexer", *two, "--enable-return-indexer-topk"),
        row("multi-item scoring", *two, "--enable-mis"),
        row(
            "deterministic inference on flashinfer",
            *(*two, "--enable-deterministic-inference", "--attention-backend", "flashinfer"),
        ),
        row("KV in blocks with scales, fp8", *two, "--kv-cache-dtype", "mxfp8"),
        row("KV in blocks with scales, fp4", *two, "--kv-cache-dtype", "nvfp4"),
    )


def _needing() -> tuple[Mode, ...]:
    def row(name: str, needs: str, *flags: str) -> Mode:
        return Mode(name=name, flags=flags, verdict="needs", needs=needs)

    return (
        row("expert parallelism within a rank", "a GPU: SGLang's experts on CPUs end with it", "--ep-size", "2"),
        row("expert parallelism over DeepEP, two-batch overlap", "GPUs and DeepEP", "--moe-a2a-backend", "deepep"),
        row(
            "context-parallel prefills",
            GPU,
            *("--tp", "2", "--attn-cp-size", "2", "--enable-prefill-cp", "--cp-strategy", "interleave"),
        ),
        row("page sizes that a kernel chooses (FlashMLA, trtllm-mla)", GPU, "--attention-backend", "flashmla"),
        row(
            "deterministic inference on other kernels",
            GPU,
            *("--enable-deterministic-inference", "--attention-backend", "fa3"),
        ),
        row("DeepSeek sparse attention (V3.2, GLM-5)", GPU),
        row("DeepSeek-V4, compressed KV", "GPUs; no checkpoint of its shapes fits one"),
        row("sliding windows between GPUs (Gemma 4, Llama 4)", GPU),
        row("attention sinks beside sliding windows (gpt-oss)", GPU),
        row("state space and linear attention of other kinds (Mamba 2, Kimi Linear)", "kernels of a GPU"),
        row("states between GPUs (Qwen3-Next, Qwen3.5)", GPU),
        row("video, audio", "a tiny model and clips; their keys are made as those of images"),
        row("encoders on machines of their own", "a second server", "--language-only"),
        row("memory given back by a GPU", GPU, SAVER, "--banyan-host-gb", "1"),
        row("weight updates by RDMA", "an RDMA device"),
    )


MODES = (*_served(), *_refused(), *_needing())
