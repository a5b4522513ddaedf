# SPDX-License-Identifier: Apache-2.0
"""What a million tokens cost on each tier, and how long a drive lives under each write policy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from banyan.core import PageKey
from banyan.pacing.admission import Admission, WriteAdmission, WriteVerdict
from banyan.pacing.allowance import Allowance
from banyan_lab.sim.figures import TUTTI, Figure
from banyan_lab.sim.hardware import drive
from banyan_lab.sim.llms import llm
from banyan_lab.sim.tutti import DRIVE, play, request, tiers

GPU_PER_HOUR = 5.0
DRAM_PER_GB_HOUR = 0.0088
SSD_PER_GB_HOUR = 0.000082
DRAM_GB, SSD_GB = 1_400, 14_000
HIT_SHARE, HBM_HIT_SHARE = 0.75, 0.08
PAGE_TOKENS = 64
DAY_S = 86_400
REQUESTS_PER_S = 1.5


@dataclass(frozen=True, slots=True)
class Price:
    """A tier's cost. ``tokens_per_s`` are prompt tokens at saturation."""

    title: str
    tokens_per_s: float
    per_hour: float

    @property
    def per_million_tokens(self) -> float:
        return self.per_hour / (self.tokens_per_s * 3600) * 1e6


def prices() -> dict[str, Price]:
    """One H100 of prompts of the published length, one after the other; HBM alone keeps 8 % of the prefixes."""
    named = tiers()

    def price(title: str, tier: str, hit_share: float, per_hour: float) -> Price:
        forward, _ = play(named[tier], hit_share, number=4)
        prompt = request(hit_share)
        return Price(title, (prompt.prefix_tokens + prompt.new_tokens) / forward.total_s, GPU_PER_HOUR + per_hour)

    dram, ssd = DRAM_GB * DRAM_PER_GB_HOUR, SSD_GB * SSD_PER_GB_HOUR
    return {
        "hbm": price("HBM only", "dram", HBM_HIT_SHARE, 0.0),
        "dram": price("DRAM", "dram", HIT_SHARE, dram),
        "ssd": price("SSD, CPU-centric", "ssd", HIT_SHARE, ssd),
        "gds": price("SSD with GDS", "gds", HIT_SHARE, ssd),
        "paced": price("SSD, slack-aware", "paced", HIT_SHARE, ssd),
    }


def cost_figures() -> Iterator[Figure]:
    named = prices()
    source = f"{TUTTI}, cost formula with its prices"
    for price in named.values():
        yield Figure(
            name=f"cost of a million prompt tokens: {price.title}",
            published=None,
            simulated=price.per_million_tokens,
            unit="$",
            source=source,
        )
    order = sorted(named, key=lambda name: named[name].per_million_tokens)
    yield Figure(
        name="slack-aware SSD is cheapest, then GDS, then plain SSD",
        published=1.0,
        simulated=float(
            [name for name in order if name in ("paced", "gds", "ssd")] == ["paced", "gds", "ssd"]
            and order[0] == "paced"
        ),
        unit="true",
        source=source,
        within=0.0,
        note=" < ".join(order),
    )
    for name, published in (("ssd", 66.2), ("gds", 27.0)):
        yield Figure(
            name=f"cost saved by slack-aware SSD against {named[name].title}",
            published=published,
            simulated=100 * (1 - named["paced"].per_million_tokens / named[name].per_million_tokens),
            unit="%",
            source=f"{TUTTI}, figure 14 (LooGLE, 0.5 req/s)",
            within=10.0,
            note="simulated at saturation, where the whole bubble is lost; the source's is at a fixed request rate",
        )


@dataclass(frozen=True, slots=True)
class Wear:
    """A day of writes."""

    written_bytes: float

    def drive_writes_per_day(self, capacity_bytes: float) -> float:
        return self.written_bytes / capacity_bytes


def wear(admission: Admission, *, budget_bytes_per_day: int | None, requests_per_s: float, hours: float = 2.0) -> Wear:
    """Conversations whose pages are offered turn by turn, as the plugin offers them, scaled up to a day.

    Turns of a conversation are geometric with mean 4: three of four requests come back, the published hit share.
    """
    chance = random.Random("0/wear")
    page_bytes = int(llm("llama3-8b").kv_bytes_per_token * PAGE_TOKENS)
    budget = None
    if budget_bytes_per_day is not None:
        burst_bytes = max(page_bytes, int(budget_bytes_per_day * hours / 24 / 10))
        budget = Allowance(per_s=budget_bytes_per_day / DAY_S, burst=burst_bytes, now_s=0.0)
    judge = WriteAdmission(admission, budget=budget)
    stored: set[str] = set()
    live: list[tuple[int, int]] = []
    now_s, written, number = 0.0, 0, 0
    while now_s < hours * 3600:
        now_s += chance.expovariate(requests_per_s)
        if not live or chance.random() < 1 - HIT_SHARE:
            number += 1
            live.append((number, 0))
        place = chance.randrange(len(live))
        conversation, num_pages = live[place]
        num_pages += 1 + int(chance.expovariate(1 / 24))
        live[place] = conversation, num_pages
        if chance.random() < 1 - HIT_SHARE:
            live[place] = live[-1]
            live.pop()
        for page in range(num_pages):
            key = f"{conversation}/{page}"
            if key in stored:
                continue
            if judge.judge(PageKey(key), page_bytes, int(now_s * 1e9)) is WriteVerdict.QUEUED:
                stored.add(key)
                written += page_bytes
    return Wear(written * 24 / hours)


def endurance_figures() -> Iterator[Figure]:
    spec = drive(DRIVE)
    allowed = int(spec.drive_writes_per_day * spec.capacity_bytes)
    for title, admission, budget in (
        ("every page", Admission.FIRST_ACCESS, None),
        ("pages seen twice", Admission.SECOND_ACCESS, None),
        ("every page, within the budget", Admission.FIRST_ACCESS, allowed),
        ("pages seen twice, within the budget", Admission.SECOND_ACCESS, allowed),
    ):
        day = wear(admission, budget_bytes_per_day=budget, requests_per_s=REQUESTS_PER_S)
        yield Figure(
            name=f"drive writes per day, {title}, {REQUESTS_PER_S} requests/s of 64K tokens at most",
            published=None,
            simulated=day.drive_writes_per_day(spec.capacity_bytes),
            unit="1/day",
            source="banyan.pacing's write admission; the drive allows 1 a day for five years",
            note="Tutti does not report endurance",
        )


def figures() -> Iterator[Figure]:
    yield from cost_figures()
    yield from endurance_figures()
