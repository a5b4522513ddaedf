# SPDX-License-Identifier: Apache-2.0
"""How likely a page is to be wanted, by its age and by how often it was asked for: two powers that are learnt.

Which of the two tells more depends on the work. A conversation that grows comes back soon or never: age says nearly
all. Prompts of many conversations in turn come back as often as they did before, however long that is ago: the number
of sights says nearly all. Prompts that come round one after the other are the likelier the longer they are away.

So nothing is assumed but the form, ``age ** age_power * num_sights ** sights_power``. Whenever a page comes back, it is
compared with one that might have come and did not, drawn by lot. The powers move, so that the page that came would have
been taken for the likelier one, and the more the less it was. This is the partial likelihood of Cox's proportional
hazards (1972), with one control for each event, climbed one step at a time.

Invariants
  1. The powers stay within ``MOST_POWER`` of nothing.
  2. A step takes the same time whatever was learnt before.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

LEAST_AGE_POOLS = 1 / 64
"""Pages younger than this are equally young."""

MOST_AGE_POOLS = 16.0
"""Pages older than this are equally old: what is remembered does not reach further."""

STEP = 0.05
"""See docs/design/0014."""

MOST_POWER = 4.0


class Seen(NamedTuple):
    """A page as it was before a prompt came. ``age_pools``: pages asked for since, over those of the pool."""

    age_pools: float
    num_sights: int


class Chances:
    """Begins with what suits both growing conversations and a hot set: the younger, the likelier, and a page that was
    asked for four times as likely as one that is half as old."""

    def __init__(self) -> None:
        self.age_power = -1.0
        self.sights_power = 0.5

    def of(self, age_pools: float, num_sights: int) -> float:
        """Of being wanted next, as against other pages."""
        # As ``_within``, without its call: every look at a leaf asks.
        if age_pools < LEAST_AGE_POOLS:
            age_pools = LEAST_AGE_POOLS
        elif age_pools > MOST_AGE_POOLS:
            age_pools = MOST_AGE_POOLS
        chance: float = age_pools**self.age_power * num_sights**self.sights_power
        return chance

    def came(self, wanted: Seen, other: Seen) -> None:
        """``wanted`` has come back and ``other`` has not."""
        older = log(_within(wanted.age_pools) / _within(other.age_pools))
        oftener = log(wanted.num_sights / other.num_sights)
        surprise = 1.0 / (1.0 + exp(self.age_power * older + self.sights_power * oftener))
        self.age_power = _bounded(self.age_power + STEP * surprise * older)
        self.sights_power = _bounded(self.sights_power + STEP * surprise * oftener)

    def state(self) -> dict[str, float]:
        """For people."""
        return {"age_power": round(self.age_power, 2), "sights_power": round(self.sights_power, 2)}


def _within(age_pools: float) -> float:
    return min(max(age_pools, LEAST_AGE_POOLS), MOST_AGE_POOLS)


def _bounded(power: float) -> float:
    return min(max(power, -MOST_POWER), MOST_POWER)
