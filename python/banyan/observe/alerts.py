# SPDX-License-Identifier: Apache-2.0
"""When somebody should look: each condition once, for `banyan top`, the page and Prometheus.

A condition is about one rank. Prometheus' rules are made from the same table (``scripts/docs.py``), so they say
the same thing under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

from banyan.observe.rates import ALERT_S, Rates
from banyan.observe.reading import RankReading
from banyan.telemetry import DESCRIPTIONS, SERIES

WINDOW = "5m"
START_S = 600.0
"""So long after a rank's start all that it has counted is news."""

PLACED = tuple(name for name in DESCRIPTIONS if name.startswith("placed_") and name != "placed_hot_avoided")
"""Counters of requests that were placed, one for each reason."""


def _shown(name: str) -> str:
    """What a query calls it."""
    return SERIES[name].name


@dataclass(frozen=True, slots=True)
class Grown:
    """A counter of what should not happen has grown."""

    counter: str

    def holds(self, rates: Rates, rank: RankReading) -> bool:
        return rates.grown(rank, self.counter) > 0

    def promql(self) -> str:
        shown = _shown(self.counter)
        # What happened while the server started, before the first look at it, is no increase.
        return f"increase({shown}[{WINDOW}]) > 0 or ({shown} > 0 and {_shown('up_s')} < {START_S:g})"


@dataclass(frozen=True, slots=True)
class Share:
    """One counter has grown by more than ``limit`` times others together. ``least``: so much at least, to be news."""

    counter: str
    of: tuple[str, ...]
    limit: float
    least: float = 1.0

    def holds(self, rates: Rates, rank: RankReading) -> bool:
        part = rates.grown(rank, self.counter)
        return part >= self.least and part > self.limit * sum(rates.grown(rank, name) for name in self.of)

    def promql(self) -> str:
        whole = " + ".join(f"increase({_shown(name)}[{WINDOW}])" for name in self.of)
        part = f"increase({_shown(self.counter)}[{WINDOW}])"
        return f"{part} > {self.limit:g} * ({whole}) and {part} >= {self.least * SERIES[self.counter].scale:g}"


@dataclass(frozen=True, slots=True)
class Busy:
    """A counter of microseconds takes more than ``limit`` of the time."""

    counter: str
    limit: float

    def holds(self, rates: Rates, rank: RankReading) -> bool:
        return rates.per_s(rank, self.counter) / 1e6 > self.limit

    def promql(self) -> str:
        return f"rate({_shown(self.counter)}[{WINDOW}]) > {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Above:
    """A gauge is above ``limit`` times another one; that one is 1 where none is named."""

    gauge: str
    limit: float
    of: str = ""

    def holds(self, rates: Rates, rank: RankReading) -> bool:
        return rank.has(self.gauge) and rank.value(self.gauge) > self.limit * (rank.value(self.of) if self.of else 1.0)

    def promql(self) -> str:
        whole = f"{self.limit:g} * {_shown(self.of)}" if self.of else f"{self.limit:g}"
        return f"{_shown(self.gauge)} > {whole}"


Condition = Grown | Share | Busy | Above
"""``holds``: for a rank, by what was seen of it; ``promql`` is the same as a query."""


@dataclass(frozen=True, slots=True)
class Rule:
    """``held``: how long it must hold, in Prometheus' words, before anybody is called."""

    name: str
    severity: str
    condition: Condition
    summary: str
    advice: str
    held: str = "0m"


CRITICAL, WARNING = "critical", "warning"

RULES = (
    Rule(
        "BanyanRankGone",
        CRITICAL,
        Above("num_ranks", 1, of="num_live_ranks"),
        "a rank of this server is not there, or shares nothing",
        "SGLang ends the whole server when a rank dies. Where this one goes on, its log says why: restart it.",
        held="1m",
    ),
    Rule(
        "BanyanFetchFailed",
        WARNING,
        Share("fetches_failed", ("fetches",), 0.01),
        "copies do not land: their requests are run again without the cache, or end with 503",
        "No token is wrong. A store that is too small loses pages under their readers, and flushes cut reads off: see "
        "read_failed_pages, and pull_failed_pages for other nodes. Else look for `banyan:` in the rank's log.",
    ),
    Rule(
        "BanyanThreadEnded",
        CRITICAL,
        Grown("threads_ended"),
        "a thread of Banyan's has ended by a fault: what it did is off",
        "The rank's log names the thread (`banyan: the thread`). Report it, and restart the server.",
    ),
    Rule(
        "BanyanFault",
        WARNING,
        Grown("num_failures"),
        "something of Banyan's has failed; SGLang was spared it",
        "Look for `banyan:` in the server's log, and report it. Every rank shows it, whichever process it was in.",
    ),
    Rule(
        "BanyanPageDamaged",
        CRITICAL,
        Grown("store_checksum_failures"),
        "pages of the store were damaged; they are computed again",
        "Look at the drive (smartctl, dmesg), then `banyan fsck --repair` while no server uses the shelf.",
    ),
    Rule(
        "BanyanStoreReadErrors",
        WARNING,
        Grown("store_read_errors"),
        "the store's device failed reads; their pages are computed again",
        "Look at the drive (smartctl, dmesg), or at the library of the store.",
    ),
    Rule(
        "BanyanStoreStalls",
        CRITICAL,
        Grown("store_stalls"),
        "the store's device did not answer in time",
        "Look at the drive: until it answers, nothing is looked up or stored there.",
    ),
    Rule(
        "BanyanStoreStopped",
        CRITICAL,
        Above("store_is_stopped", 0),
        "the store takes no writes",
        "Look for `banyan:` in the rank's log: a failed thread needs a restart of the server; a manifest that cannot "
        "be written is tried again by itself.",
    ),
    Rule(
        "BanyanStoreWriteErrors",
        WARNING,
        Share("store_write_errors", ("store_written_pages",), 0.01),
        "the store's device fails writes: their pages are not stored",
        "Look for `banyan:` in the rank's log, then at the drive that it names (smartctl, dmesg), or at the library.",
    ),
    Rule(
        "BanyanStoreFull",
        WARNING,
        Grown("store_no_space_pauses"),
        "the store's file system is full, writes pause",
        "Free space, or lower --banyan-store-gb.",
    ),
    Rule(
        "BanyanStoreCannotGrow",
        WARNING,
        Grown("store_floor_refusals"),
        "little is free on the store's file system: the store does not grow to its quota",
        "Free space, or lower --banyan-store-gb. What the store has it keeps, and writes over.",
    ),
    Rule(
        "BanyanStoreBehind",
        WARNING,
        Share("store_put_full", ("store_written_pages",), 0.1, least=100),
        "the store does not keep up: pages that were worth a write were not taken",
        "Add a drive to --banyan-store, or admit fewer pages (--banyan-store-admit second).",
        held="10m",
    ),
    Rule(
        "BanyanStoreBudgetSpent",
        WARNING,
        Share("archive_over_budget_pages", ("archived_pages",), 0.1, least=100),
        "--banyan-store-write-gb-per-day is spent: pages that were worth a write are not stored",
        "Admit fewer pages (--banyan-store-admit second), or give the drive more days' worth.",
        held="1h",
    ),
    Rule(
        "BanyanQuarantine",
        WARNING,
        Above("num_quarantined_pages", 0.1, of="num_pool_pages"),
        "a tenth of the pool waits for its readers",
        "A peer reads slowly: look at its waits. The pool is too small for the traffic.",
        held="1m",
    ),
    Rule(
        "BanyanAllocationWaits",
        WARNING,
        Busy("alloc_wait_us", 0.02),
        "allocations wait for freed pages that are still read",
        "The pool is too small for the traffic: raise --mem-fraction-static or --max-total-tokens.",
        held="5m",
    ),
    Rule(
        "BanyanLayersWait",
        WARNING,
        Share("wait_us", ("forward_us",), 0.2, least=1e6),
        "forwards wait for pages: copies are not hidden (CPU engine only)",
        "`banyan explain all` shows what the planner expected.",
        held="5m",
    ),
    Rule(
        "BanyanChangingLine",
        WARNING,
        Grown("changing_line_prompts"),
        "a line of a session's prompts changes in every turn: nothing behind it is found",
        "`banyan top` and the page say where. Take it out at the client, or with `banyan route --drop-line`.",
    ),
    Rule(
        "BanyanFetchesRefused",
        WARNING,
        Share("fetches_refused", ("fetches",), 0.25, least=20),
        "leases are refused: pages leave between the lookup and the lease",
        "The pools are too small for the traffic, or give the arena memory (--banyan-host-gb).",
        held="5m",
    ),
    Rule(
        "BanyanBackupsDropped",
        WARNING,
        Share("backups_dropped_pages", ("backed_up_pages",), 0.25, least=1000),
        "pages leave the pool before they are in the arena",
        "Give the arena more memory (--banyan-host-gb).",
        held="5m",
    ),
    Rule(
        "BanyanReadsDropped",
        WARNING,
        Share("reads_dropped_pages", ("read_pages",), 0.25, least=1000),
        "pages of the store are computed: the arena has no frames to read them into",
        "Give the arena more memory (--banyan-host-gb): a prompt is read whole where half of a rank's part holds it.",
        held="5m",
    ),
    Rule(
        "BanyanHotRank",
        WARNING,
        Share("placed_hot_avoided", PLACED, 0.5, least=100),
        "requests keep avoiding a rank that is overloaded",
        "Clients pin requests to a rank, or one session is very large: look at the ranks' queues.",
        held="10m",
    ),
    Rule(
        "BanyanCost",
        WARNING,
        Busy("control_us", 0.05),
        "the scheduler spends more than a twentieth of the time in Banyan",
        "Please report it with the output of `banyan top --once --json`.",
        held="10m",
    ),
)


def alerts(rates: Rates) -> list[tuple[Rule, list[int]]]:
    """The rules that hold now, critical ones first, and for which ranks each does."""
    lately = rates.over(ALERT_S)
    found = [
        (rule, [rank.dp_rank for rank in lately.now.ranks if rule.condition.holds(lately, rank)]) for rule in RULES
    ]
    return sorted((alert for alert in found if alert[1]), key=lambda alert: alert[0].severity != CRITICAL)
