# SPDX-License-Identifier: Apache-2.0
"""What longer appends and answers do to DualPath's lead: they bring compute back, and stretch the time between reads.

The source does not say how it lengthens turns. Assumed: contexts stay as long as they are, so fewer turns fill them.
With as many turns as before, contexts grow with the turns, and with them what is read for each computed token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from banyan_lab.sim.figures import DUALPATH, Figure, relative
from banyan_lab.sim.offline import Outcome
from banyan_lab.sim.workload import AgentSet, agent_set

SHORT = {"append": (0.5,), "answer": (0.5,)}
LONG = {"append": (2.0, 4.0, 8.0), "answer": (2.0, 4.0, 8.0)}
"""Times the published mean lengths of the set: 429 and 176 tokens."""

SOURCE = f"{DUALPATH}, impact of append and generation length"

WHY_NOT = (
    "storage idles there and prefill is busy all the time; Basic's passes stay small, because HBM holds few whole "
    "prompts, and wait for the slowest rank in every layer"
)

Offline = Callable[[str, AgentSet], Outcome]
"""Plays a system, by name, on 660B 2P4D with all agents of a set at once."""


def speed_up(offline: Offline, workload: AgentSet) -> float:
    """Basic's job time over DualPath's."""
    return offline("basic", workload).job_s / offline("dualpath", workload).job_s


def figures(offline: Offline) -> Iterator[Figure]:
    """The published range at short appends and answers, and how it falls."""
    base = agent_set("agents-64k")
    leads = {("append", 1.0): speed_up(offline, base)}
    leads["answer", 1.0] = leads["append", 1.0]
    for what in SHORT:
        for factor in (*SHORT[what], *LONG[what]):
            leads[what, factor] = speed_up(offline, _lengthened(base, what, factor))
    short = {key: lead for key, lead in leads.items() if key[1] <= 1}
    for name, published, value in (("smallest", 1.82, min(short.values())), ("largest", 1.99, max(short.values()))):
        yield Figure(
            name=f"660B 2P4D 64K, short appends and answers: {name} speed-up of DualPath over Basic",
            published=published,
            simulated=value,
            unit="x",
            source=f"{SOURCE}: 1.82 to 1.99 where both are short",
            within=relative(published, 0.15),
            note="model, set and lengths are not in the review: the set's own lengths and half of them are assumed",
        )
    for (what, factor), lead in leads.items():
        longest = factor == max(LONG[what])
        yield Figure(
            name=f"660B 2P4D 64K, {what} x{factor:g}: speed-up of DualPath over Basic",
            published=1.0 if longest else None,
            simulated=lead,
            unit="x",
            source=f"{SOURCE}: Basic approaches DualPath; how far is not in the review" if longest else SOURCE,
            within=0.15 if longest else None,
            note=WHY_NOT if longest and what == "append" else "",
        )
    # More than twice as long, and Basic's prefill GPUs cannot hold the longest prompts.
    grown = base.scaled(append=2.0)
    yield Figure(
        name="660B 2P4D, append x2 and as many turns, so that contexts grow: speed-up of DualPath over Basic",
        published=None,
        simulated=speed_up(offline, grown),
        unit="x",
        source=SOURCE,
    )


def _lengthened(base: AgentSet, what: str, factor: float) -> AgentSet:
    return base.lengthened(append=factor) if what == "append" else base.lengthened(output=factor)
