# SPDX-License-Identifier: Apache-2.0
"""What a server says of itself (``/server_info``) and of its load (``/v1/loads``, its ranks' load feeds)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from banyan.core import MAX_RANKS, Address
from banyan.features.pairs import Role
from banyan.routing import LoadReport
from banyan.routing.reads import ReadQueue

_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")
_KEEPERS = ("hierarchical_cache", "lmcache", "flexkv")
MOST = 1 << 53
"""Of any number that a server tells: what is larger the policies could not reckon with, for any request."""
LOAD_PORT = "load_endpoint_port_base"
"""Where ``/server_info`` names the first rank's port."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a rank publishes its KV events, or its load whenever it changes (SGLang's ``--load-publish-endpoint``).

    ``replay`` gives earlier ones again; None where nothing does.
    """

    rank: int
    endpoint: str
    topic: str
    replay: str | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """One server.

    Attributes:
        num_ranks: its data-parallel ranks.
        places_itself: it runs Banyan. Its ranks share pages, and its own dispatcher knows them: the router leaves the
            rank to it. They report their load when requests arrive, and not only when a forward has ended.
        block_tokens: tokens of a page in its events; 0 without events.
        sources: one for each rank that publishes; none without events.
        load_sources: one for each rank that publishes its load; none where it must be asked for.
        started: how long each step of its start took; differs between two starts, so that a restart is noticed.
        role: what it does in a pair.
        bootstrap_port: where decode servers meet a prefill server.
        tells_arena: its events say what its host arena holds.
        lends_at: where it lends pages of that to other nodes; None where it does not.
        most_read_tokens: how many it reads there, from its store, for one of their requests at most.
        borrows_from: the page servers where its ranks may ask for such.
        has_others_read: its ranks wait for what those read from their stores.
        store: tells the store that its events are about from others; equal where servers use one together. "" where
            they tell of none.
        tenants: tells the secret by which it believes a router's word of tenants; "" where it serves everybody.
        model: the name under which it serves it.
        keeps_more: what leaves its pools may lie elsewhere: in Banyan's arena and store, HiCache, LMCache or FlexKV.
    """

    num_ranks: int = 1
    places_itself: bool = False
    block_tokens: int = 0
    sources: tuple[Source, ...] = ()
    started: str = ""
    load_sources: tuple[Source, ...] = ()
    role: Role = Role.ALONE
    bootstrap_port: int = 0
    tells_arena: bool = False
    lends_at: Address | None = None
    most_read_tokens: int = 0
    borrows_from: tuple[Address, ...] = ()
    has_others_read: bool = False
    store: str = ""
    tenants: str = ""
    model: str = ""
    keeps_more: bool = False

    @classmethod
    def read(cls, info: Mapping[str, Any], url: str) -> Description:
        """From an answer of ``/server_info`` of the server at ``url``.

        Raises:
            ValueError: when the answer is not one of SGLang's.
        """
        try:
            num_ranks = _num_ranks(info["dp_size"])
            states = info.get("internal_states") or ()
            events = info.get("kv_events")
            ranks_of_it = [state["banyan"] for state in states if isinstance(state, dict) and state.get("banyan")]
            kept = [state["page_server"] for state in ranks_of_it if state.get("page_server")]
            said = cls(
                num_ranks,
                bool(ranks_of_it),
                started=repr(info.get("startup_time")),
                role=Role(info.get("disaggregation_mode") or Role.ALONE),
                bootstrap_port=_number(info.get("disaggregation_bootstrap_port") or 0),
                tells_arena=bool(ranks_of_it) and all(state.get("tells_arena") for state in ranks_of_it),
                lends_at=Address.parse(_reachable(str(kept[0]["address"]), url)) if kept else None,
                most_read_tokens=_number(kept[0]["most_read_tokens"]) if kept else 0,
                borrows_from=_borrows_from(ranks_of_it),
                has_others_read=bool(ranks_of_it) and all(map(_waits_for_others, ranks_of_it)),
                store=_told_by_all(ranks_of_it, "tells_store"),
                tenants=_told_by_all(ranks_of_it, "tenants"),
                model=str(info.get("served_model_name") or ""),
                keeps_more=bool(ranks_of_it) or any(info.get(f"enable_{one}") for one in _KEEPERS),
            )
            if not events or events.get("publisher") != "zmq":
                return said
            ranks = range(_num_ranks(events["dp_size"]))
            return replace(
                said,
                block_tokens=_number(events["block_size"]),
                sources=tuple(_source(events, rank, url) for rank in ranks),
                load_sources=tuple(_load_source(events, rank, url) for rank in ranks if LOAD_PORT in events),
            )
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"{url}/server_info is not as SGLang 0.5.23 answers: {error!r}") from None


UNKNOWN = Description(num_ranks=0)
"""A server that has not said anything of itself, or what is not to be believed."""


def _num_ranks(said: Any) -> int:
    num_ranks = max(1, int(said))
    if num_ranks > MAX_RANKS:
        raise ValueError(f"{num_ranks} ranks, at most {MAX_RANKS}")
    return num_ranks


def _number(said: Any) -> int:
    """Of something that there is none of at least."""
    number = max(0, int(said))
    if number > MOST:
        raise ValueError(f"a number of more than {MOST}")
    return number


def _rate(said: Any) -> float | None:
    """Of reads; None where there is none yet, and for what is none."""
    rate = float(said or 0)
    return rate if 0 < rate <= MOST else None


def _borrows_from(states: Sequence[Mapping[str, Any]]) -> tuple[Address, ...]:
    """Those that all of its ranks may ask."""
    if not states or not all(state.get("nodes") for state in states):
        return ()
    return tuple(Address.parse(str(page_server)) for page_server in states[0]["nodes"]["asked"])


def _told_by_all(states: Sequence[Mapping[str, Any]], what: str) -> str:
    """What all of its ranks tell alike."""
    told = {str(state.get(what) or "") for state in states}
    return told.pop() if len(told) == 1 else ""


def _waits_for_others(state: Mapping[str, Any]) -> bool:
    """Whether a rank waits for what others read for it, and has a store itself."""
    return bool(state.get("waits_for_remote_prefetches")) and state.get("store") is not None


def _reachable(address: str, url: str) -> str:
    """``HOST:PORT`` as a server names it, with the host of ``url`` for a wildcard."""
    host, _, port = address.rpartition(":")
    if host in _WILDCARDS:
        host = urlsplit(url).hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}"


def _source(events: Mapping[str, Any], rank: int, url: str) -> Source:
    replay = events.get("replay_endpoint_port_base")
    return Source(
        rank,
        _endpoint(events, events["endpoint_port_base"], rank, url),
        topic=str(events.get("topic") or ""),
        replay=None if replay is None else _endpoint(events, replay, rank, url),
    )


def _load_source(events: Mapping[str, Any], rank: int, url: str) -> Source:
    return Source(rank, _endpoint(events, events[LOAD_PORT], rank, url), str(events.get("load_topic") or ""))


def _endpoint(events: Mapping[str, Any], first_port: Any, rank: int, url: str) -> str:
    return "tcp://" + _reachable(f"{events['endpoint_host']}:{int(first_port) + rank}", url)


def read_loads(answer: Mapping[str, Any], asked_s: float) -> tuple[dict[int, LoadReport], ReadQueue]:
    """Rank -> its load, and what the ranks together wait for from their store, from an answer of ``/v1/loads`` to a
    question of time ``asked_s`` on the router's clock.

    A report's age is taken on the server's clock and subtracted on the router's: clocks may differ.

    Raises:
        ValueError: when the answer is not one of SGLang's.
    """
    try:
        loads, server_now_s = answer["loads"], datetime.fromisoformat(str(answer["timestamp"])).timestamp()
        rates = [rate for load in loads if (rate := _rate(load.get("read_tokens_per_s"))) is not None]
        reads = ReadQueue(sum(_number(load.get("read_queue_tokens") or 0) for load in loads), sum(rates) or None)
        reports = {
            int(load["dp_rank"]): LoadReport(
                taken_s=asked_s - max(0.0, server_now_s - float(load["timestamp"])),
                stamp_s=float(load["timestamp"]),
                num_running=_number(load["num_running_reqs"]),
                num_waiting=_number(load["num_waiting_reqs"]),
                pending_prefill_tokens=_number(load["num_waiting_uncached_tokens"]),
                ongoing_tokens=_number(load["num_total_tokens"]),
                capacity_tokens=_number(load["max_total_num_tokens"]),
                total_prefill_tokens=_number(load.get("total_prefill_uncached_tokens") or 0),
                total_prefill_us=_number(load.get("total_prefill_busy_us") or 0),
            )
            for load in loads
        }
        return reports, reads
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"/v1/loads is not as SGLang 0.5.23 answers: {error!r}") from None


def together(reports: Mapping[int, LoadReport]) -> LoadReport:
    """The load of a server as one target: sums, as new as the newest: an idle rank does not report."""
    if not reports:
        return LoadReport()
    every = list(reports.values())
    return LoadReport(
        taken_s=max(report.taken_s for report in every),
        num_running=sum(report.num_running for report in every),
        num_waiting=sum(report.num_waiting for report in every),
        pending_prefill_tokens=sum(report.pending_prefill_tokens for report in every),
        ongoing_tokens=sum(report.ongoing_tokens for report in every),
        # Ranks prefill beside each other: the tokens add up, the time is the mean.
        total_prefill_tokens=sum(report.total_prefill_tokens for report in every),
        total_prefill_us=sum(report.total_prefill_us for report in every) // len(every),
    )
