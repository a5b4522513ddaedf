# SPDX-License-Identifier: Apache-2.0
"""What cannot be shared of a model that keeps something beside its pages, sliding windows or states: pure, one line for
each reason, with the way out.

With ``--disable-hybrid-swa-memory`` SGLang keeps the windows' KV in full, in the ordinary pool: then the model is one
of full attention here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from banyan.refusals import MAX_SLOTS
from banyan.refusals.models import ModelFacts

STRATEGY = "extra_buffer"
"""SGLang's way to keep states at the ends of pages of several tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFacts:
    """What the decision depends on. Defaults are a server that can share what its model keeps.

    Attributes:
        replays: steps are kept beside a state that has not taken them yet.
        prefill_graphs: SGLang's way to run prefills as CUDA graphs.
        captures_states: layers with states are a part of these where they can be.
        algorithm: of speculation.
        asked_store: the scheme of a store that has to be asked what it holds.
    """

    model: ModelFacts = field(default_factory=ModelFacts)
    device: str = "cpu"
    strategy: str = STRATEGY
    has_int8_checkpoints: bool = False
    replays: bool = False
    prefill_graphs: str = "disabled"
    captures_states: bool = False
    algorithm: str | None = None
    disaggregation_mode: str = "null"
    is_context_parallel: bool = False
    deals_with_nodes: bool = False
    keeps_arena: bool = False
    asked_store: str = ""
    num_slots: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A kind of what is kept, and what the table says of it."""

    keeps: str
    slots: str
    way_out: str


_WINDOWS = _Kind(
    keeps="keeps its sliding windows in a pool of their own",
    slots="with two pools each",
    way_out="use --disable-hybrid-swa-memory (which takes more memory), or --banyan-share off",
)
_STATES = _Kind(
    keeps="keeps states beside its pages",
    slots="with states",
    way_out="use --banyan-share off",
)
_COMPRESSED = _Kind(
    keeps="keeps its KV compressed, and its windows in a pool of their own",
    slots="with two pools each",
    way_out="use --banyan-share off",
)
_ALL = (_WINDOWS, _COMPRESSED, _STATES)

_Row = tuple[tuple[_Kind, ...], Callable[[KindFacts], bool], Callable[[KindFacts, _Kind], str]]

_TABLE: tuple[_Row, ...] = (
    (
        (_WINDOWS,),
        lambda f: f.device == "cpu" and f.model.has_sinks,
        lambda f, kind: (
            "SGLang's attention sinks have no kernel for the CPU but --attention-backend intel_amx's: name it, and"
        ),
    ),
    (
        (_COMPRESSED,),
        lambda f: f.device != "cuda",
        lambda f, kind: f"SGLang's pools for it are known on NVIDIA GPUs only, and this is {f.device}:",
    ),
    (
        (_COMPRESSED,),
        lambda f: f.prefill_graphs == "breakable",
        # Its indexers and compressors are parts of a piece, and do not wait when that is replayed.
        lambda f, kind: (
            "--cuda-graph-backend-prefill breakable: a layer reads pages before it has waited for them: use full or "
            "disabled there, or"
        ),
    ),
    (
        (_STATES,),
        lambda f: f.strategy != STRATEGY,
        lambda f, kind: (
            f"--mamba-radix-cache-strategy {f.strategy}: only with {STRATEGY} are states kept at the ends of pages, in "
            f"slots that are there from the start: use {STRATEGY}, where the model and its backend have it, or"
        ),
    ),
    (
        (_STATES,),
        lambda f: f.has_int8_checkpoints,
        lambda f, kind: (
            "--enable-int8-mamba-checkpoint: what is kept in int8 lies in a pool that is not shared: drop that flag, or"
        ),
    ),
    (
        (_STATES,),
        lambda f: f.replays,
        lambda f, kind: (
            "--enable-linear-replayssm, --enable-linear-replayssm-spec: a state lacks the last steps then: drop those "
            "flags, or"
        ),
    ),
    (
        (_STATES,),
        lambda f: f.device != "cpu" and f.captures_states and f.prefill_graphs == "breakable",
        lambda f, kind: (
            "SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND: within a piece of a prefill's graph a layer reads its state "
            "before it has waited for it: unset it, or"
        ),
    ),
    (
        (_STATES,),
        lambda f: f.model.has_side_states,
        lambda f, kind: "more than the state goes with each of its slots:",
    ),
    (
        (_STATES,),
        lambda f: f.device == "cpu" and f.algorithm is not None,
        lambda f, kind: (
            f"--speculative-algorithm {f.algorithm}: SGLang verifies drafts over states with GPU kernels only: drop "
            "that flag, or"
        ),
    ),
    (
        _ALL,
        lambda f: f.is_context_parallel,
        lambda f, kind: (
            "--attn-cp-size, --enable-prefill-cp: whether each shard of a context-parallel group has all of them is "
            "not known: drop those flags, or"
        ),
    ),
    (
        _ALL,
        lambda f: f.disaggregation_mode != "null",
        lambda f, kind: f"--disaggregation-mode {f.disaggregation_mode}: pairs hand over pages of one pool:",
    ),
    (
        _ALL,
        lambda f: f.deals_with_nodes,
        lambda f, kind: "--banyan-listen, --banyan-peers: other nodes are lent pages of one pool: drop those flags, or",
    ),
    (
        _ALL,
        lambda f: f.keeps_arena,
        lambda f, kind: "--banyan-keep-host-arena: what is kept has pages of one pool: drop that flag, or",
    ),
    (
        _ALL,
        lambda f: bool(f.asked_store),
        lambda f, kind: (
            f"--banyan-store {f.asked_store}://: a store that has to be asked is asked for pages of one pool: name a "
            "folder (file://, 3fs://), or"
        ),
    ),
    (
        _ALL,
        lambda f: f.num_slots > MAX_SLOTS,
        lambda f, kind: (
            f"--dp-size, --tp-size: {kind.slots} the ranks take {f.num_slots} member slots of {MAX_SLOTS}: "
            "use fewer, or"
        ),
    ),
)


def kind_refusals(facts: KindFacts) -> list[str]:
    """One line for each reason why what this model keeps cannot be shared; none for a model that keeps pages only."""
    model = facts.model
    has_plain_windows = model.has_window and not model.has_compressed_kv
    kinds = (_WINDOWS, has_plain_windows), (_COMPRESSED, model.has_compressed_kv), (_STATES, model.has_states)
    kept = [kind for kind, is_kept in kinds if is_kept]
    return [
        f"this model ({model.architecture}) {kind.keeps}; {line(facts, kind)} {kind.way_out}"
        for kind in kept
        for kinds, applies, line in _TABLE
        if kind in kinds and applies(facts)
    ]


def kept_states_refusal(reason: str, strategies: Sequence[str]) -> str:
    """The line for a model of which SGLang keeps no states at the ends of pages. ``reason``: in its words;
    ``strategies``: those that would keep them."""
    way_out = f"--mamba-radix-cache-strategy {strategies[0]}" if strategies else "--banyan-share off"
    return (
        f"SGLang keeps no states of this model for pages of several tokens ({reason}): use {way_out}, or start without "
        "--enable-banyan"
    )
