# SPDX-License-Identifier: Apache-2.0
"""What cannot be shared of a model that keeps states (state space, linear attention): pure, one line for each, with the
way out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from banyan.feature import Asked
from banyan.refusals import MAX_SLOTS
from banyan.refusals.models import STRATEGY
from banyan.refusals.rule import Rule, lines_of
from banyan.store.location import asked_scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """What the decision depends on, of a model with states. Defaults are a server that can share them."""

    architecture: str = ""
    device: str = "cpu"
    strategy: str = STRATEGY
    has_int8_checkpoints: bool = False
    replays: bool = False
    """Whether steps are kept beside a state that has not taken them yet."""
    has_side_states: bool = False
    """Whether more than a state goes with a slot."""
    algorithm: str | None = None
    """Of speculation."""
    disaggregation_mode: str = "null"
    steps_together: bool = False
    deals_with_nodes: bool = False
    keeps_arena: bool = False
    asked_store: str = ""
    """The scheme of a store that has to be asked what it holds."""
    num_slots: int = 8


_RULES: tuple[Rule[StateFacts], ...] = (
    Rule(lambda f: f.device != "cpu", lambda f: f"on --device {f.device} states are not copied yet: use"),
    Rule(
        lambda f: f.strategy != STRATEGY,
        lambda f: (
            f"--mamba-radix-cache-strategy {f.strategy}: only with {STRATEGY} are states kept at the ends of pages, in "
            f"slots that are there from the start: use {STRATEGY}, where the model and its backend have it, or use"
        ),
    ),
    Rule(
        lambda f: f.has_int8_checkpoints,
        lambda f: (
            "--enable-int8-mamba-checkpoint: what is kept in int8 lies in a pool that is not shared: drop that flag, "
            "or use"
        ),
    ),
    Rule(
        lambda f: f.replays,
        lambda f: (
            "--enable-linear-replayssm, --enable-linear-replayssm-spec: a state lacks the last steps then: drop those "
            "flags, or use"
        ),
    ),
    Rule(lambda f: f.has_side_states, lambda f: "more than the state goes with each of its slots: use"),
    Rule(
        lambda f: f.algorithm is not None,
        lambda f: f"--speculative-algorithm {f.algorithm}: drafts beside states are not shared: drop that flag, or use",
    ),
    Rule(
        lambda f: f.disaggregation_mode != "null",
        lambda f: f"--disaggregation-mode {f.disaggregation_mode}: pairs hand over pages of one pool: use",
    ),
    Rule(
        lambda f: f.steps_together,
        lambda f: (
            "--enable-dp-attention, --attn-dp-size: ranks in step would wait for states too: use --dp N alone, or use"
        ),
    ),
    Rule(
        lambda f: f.deals_with_nodes,
        lambda f: "--banyan-listen, --banyan-peers: other nodes are lent pages of one pool: drop those flags, or use",
    ),
    Rule(
        lambda f: f.keeps_arena,
        lambda f: "--banyan-keep-host-arena: what is kept has pages of one pool: drop that flag, or use",
    ),
    Rule(
        lambda f: bool(f.asked_store),
        lambda f: (
            f"--banyan-store {f.asked_store}://: a store that has to be asked is asked for pages of one pool: name a "
            "folder (file://, 3fs://), or use"
        ),
    ),
    Rule(
        lambda f: f.num_slots > MAX_SLOTS,
        lambda f: (
            f"--dp-size, --tp-size: with states the ranks take {f.num_slots} places of {MAX_SLOTS}: use fewer, or use"
        ),
    ),
)


def state_refusals(facts: StateFacts) -> list[str]:
    """One line for each reason why this model cannot be shared."""
    model = f"this model ({facts.architecture}) keeps states beside its pages"
    return [f"{model}; {line} --banyan-share off" for line in lines_of(_RULES, facts)]


def refusals(asked: Asked) -> list[str]:
    """Of a server as it was asked for; ``args`` are missing where a model is looked at by itself."""
    model, config, args = asked.model, asked.config, asked.args
    if model is None or not model.has_states:
        return []
    scheme = asked_scheme(config)
    facts = StateFacts(
        architecture=model.architecture,
        device=asked.device,
        has_side_states=model.has_side_states,
        algorithm=asked.algorithm,
        disaggregation_mode=asked.disaggregation_mode,
        steps_together=asked.steps_together,
        deals_with_nodes=config.deals_with_nodes,
        keeps_arena=bool(config.keep_host_arena),
        asked_store=scheme,
        num_slots=8 if asked.layout is None else asked.layout.num_slots_with_windows,
    )
    if args is not None:
        facts = replace(
            facts,
            strategy=args.mamba_radix_cache_strategy,
            has_int8_checkpoints=args.enable_int8_mamba_checkpoint,
            replays=args.enable_linear_replayssm or args.enable_linear_replayssm_spec,
        )
    return state_refusals(facts)
