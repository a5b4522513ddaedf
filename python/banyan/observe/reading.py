# SPDX-License-Identifier: Apache-2.0
"""One look at one server: the ``banyan`` objects of its ``/server_info``, and its ``/v1/loads``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from banyan.core import MAX_RANKS
from banyan.decoding import printable
from banyan.observe.request_history import as_told
from banyan.planner.planner import MAX_DECISIONS
from banyan.telemetry import DESCRIPTIONS, gauges_of, rid_pseudonym
from banyan.telemetry.changing_lines import MOST_SHOWN
from banyan.telemetry.recent_prompts import MAX_PROMPTS

C = TypeVar("C", bound=Collection[Any])

HIT_SOURCES = ("own", "peer", "host", "store")
"""Where cached tokens were, the nearest first; counters ``<source>_tokens``."""


MOST_FIGURE = 2.0**64


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """One of a rank's last prompts, and who holds how many leading tokens of it.

    Attributes:
        marks: rising places in it, in tokens from the root, and the key of the page that ends at each; at least one.
        pools: by rank.
    """

    rid: str
    num_turns: int
    seen_s: float
    marks: dict[int, str]
    pools: tuple[int, ...]
    arena: int

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> SeenPrompt:
        marks = {int(tokens): str(key) for tokens, key in told["marks"]}
        if not marks or [0, *marks] != sorted({0, *marks}):
            raise ValueError("a prompt whose marks do not rise from its first token")
        return cls(
            rid=str(told["rid"]),
            num_turns=int(told["num_turns"]),
            seen_s=_finite(told["seen_s"]),
            marks=marks,
            pools=tuple(int(tokens) for tokens in told["pools"]),
            arena=int(told["arena"]),
        )

    @property
    def num_tokens(self) -> int:
        return next(reversed(self.marks))


@dataclass(frozen=True, slots=True)
class ChangingLine:
    """A line that was another one in ``num_prompts`` prompts of a session in a row: ``place`` tokens are before it, of
    ``num_tokens``. ``part``: of a chat, "" where not known. ``text``: "" where it is not told."""

    place: int
    num_prompts: int
    num_tokens: int
    part: str
    text: str

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> ChangingLine:
        place, num_prompts, num_tokens = (int(told[name]) for name in ("place", "num_prompts", "num_tokens"))
        return cls(place, num_prompts, num_tokens, printable(str(told["part"])), str(told["text"]))


@dataclass(frozen=True, slots=True)
class RankReading:
    """One data-parallel rank, by its first shard.

    Attributes:
        node: of the server's, the one that it is on.
        num_shards: what the first one tells of places (the stores, the arena) is its part only.
        values: its counters and gauges, by their names in ``/metrics``.
        num_running, num_waiting, num_used_tokens: its load; None where the server does not tell.
        prompts, plans: its last prompts and who holds them; its last decisions, as far as they can be said.
        changing_lines: the last lines that have changed in every turn of a session, and where.
        rid_nonce: by which ids of requests in these are pseudonyms.
    """

    dp_rank: int
    up_s: float
    page_tokens: int
    values: Mapping[str, float]
    node: int = 0
    num_shards: int = 1
    num_running: int | None = None
    num_waiting: int | None = None
    num_used_tokens: int | None = None
    prompts: Sequence[SeenPrompt] = field(default=(), repr=False)
    plans: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    changing_lines: Sequence[ChangingLine] = ()
    rid_nonce: str = ""

    def value(self, name: str) -> float:
        """A counter or gauge; 0 for one that the rank has not."""
        return self.values.get(name, 0.0)

    def has(self, name: str) -> bool:
        return name in self.values


@dataclass(frozen=True, slots=True)
class Reading:
    """A server at time ``taken_s``, in seconds since the epoch."""

    url: str
    taken_s: float
    model: str
    version: str
    ranks: tuple[RankReading, ...]

    @classmethod
    def of(cls, url: str, taken_s: float, info: Mapping[str, Any], loads: Mapping[str, Any] | None) -> Reading:
        """From the server's answers.

        Raises:
            ValueError: when no rank runs Banyan, or the answers are not SGLang's, or tell of more ranks or more of a
                rank than ours.
        """
        try:
            states = [state["banyan"] for state in info.get("internal_states") or () if "banyan" in state]
            load_of = {int(load["dp_rank"]): load for load in (loads or {}).get("loads", ())}
            firsts: dict[int, Mapping[str, Any]] = {}
            for state in sorted(states, key=lambda state: int(state.get("shard", 0))):
                firsts.setdefault(int(state["dp_rank"]), state)
            _at_most(MAX_RANKS, firsts)
            ranks = tuple(_rank(number, firsts[number], load_of.get(number)) for number in sorted(firsts))
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            said = f"{url}/server_info is not as Banyan's ranks answer: {error!r}"
            raise ValueError(f"{said}: is it another release of Banyan?") from None
        if not ranks:
            raise ValueError(f"{url} runs without Banyan: start it with --enable-banyan")
        model, version = (printable(str(info.get(name, ""))) for name in ("model_path", "version"))
        return cls(url, taken_s, model, version, ranks)

    def total(self, name: str) -> float:
        """A counter or gauge, over all ranks."""
        return sum(rank.value(name) for rank in self.ranks)

    def of_nodes(self, name: str, window: str) -> float:
        """A share of prompt tokens that each rank tells of its node: the one's that has heard most there, over all
        nodes; 0 where none has heard of any in that time."""
        heard = f"heard_tokens_{window}"
        most = {rank.node: rank for rank in sorted(self.ranks, key=lambda rank: rank.value(heard))}.values()
        whole = sum(rank.value(heard) for rank in most)
        return sum(rank.value(name) * rank.value(heard) for rank in most) / whole if whole else 0.0

    @property
    def distinct_share(self) -> float:
        """Distinct pages over pages held, over all ranks."""
        held = self.total("num_published_pages")
        weighted = sum(rank.value("distinct_share") * rank.value("num_published_pages") for rank in self.ranks)
        return weighted / held if held else 1.0


def _rank(number: int, state: Mapping[str, Any], load: Mapping[str, Any] | None) -> RankReading:
    # Under `forwards` the planner tells its last ones, one by one.
    counted = {name: state[name] for name in DESCRIPTIONS if isinstance(state.get(name), int | float)}
    told, layout = {} if load is None else load, state.get("layout", {})
    rid_nonce, plans = str(state["rid_nonce"]), state.get("plans") or ()
    # One of which no pseudonym can be made would fail only when somebody asks for a request.
    rid_pseudonym(rid_nonce, "")
    return RankReading(
        dp_rank=number,
        up_s=_finite(state.get("up_s", 0.0)),
        page_tokens=int(state["page_tokens"]),
        values={name: _finite(value) for name, value in (counted | gauges_of(state)).items()},
        node=int(layout.get("node", 0)),
        num_shards=int(layout.get("attn_cp", 1)) * int(layout.get("attn_tp", 1)),
        num_running=_number(told.get("num_running_reqs")),
        num_waiting=_number(told.get("num_waiting_reqs")),
        num_used_tokens=_number(told.get("num_used_tokens")),
        prompts=tuple(map(SeenPrompt.of, _at_most(MAX_PROMPTS, state.get("prompts") or ()))),
        plans=tuple({"dp_rank": number, **plan} for plan in map(as_told, _at_most(MAX_DECISIONS, plans)) if plan),
        changing_lines=tuple(map(ChangingLine.of, _at_most(MOST_SHOWN, state.get("changing_lines") or ()))),
        rid_nonce=rid_nonce,
    )


def _at_most(most: int, told: C) -> C:
    """``told``, of which a server is not to keep whoever looks busy."""
    if len(told) > most:
        raise ValueError(f"{len(told)} of what there are {most} at most")
    return told


def _finite(value: Any) -> float:
    """A figure, of which sums are figures as well."""
    figure = float(value)
    if not abs(figure) <= MOST_FIGURE:
        raise ValueError(f"{value!r} is no figure of a rank's")
    return figure


def _number(value: Any) -> int | None:
    return None if value is None else int(value)
