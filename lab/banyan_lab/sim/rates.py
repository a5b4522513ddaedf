# SPDX-License-Identifier: Apache-2.0
"""Online serving by arrival rate: the parts of the time to the first token, the second token, and each further one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from banyan_lab.sim.figures import DUALPATH, Figure
from banyan_lab.sim.latencies import Part
from banyan_lab.sim.online import RUN_S, WARM_S, Service, serve
from banyan_lab.sim.systems import SYSTEMS, deployment
from banyan_lab.sim.workload import agent_set

RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Agents per second: from far below what Basic serves within the SLO to what DualPath just does."""

COMPARED = ("basic", "dualpath")


@dataclass(frozen=True)
class RateSweep:
    """Systems by arrival rate, on one deployment. The source names neither the set nor the rates: 64K is assumed."""

    rates: Sequence[float] = RATES
    warm_s: float = WARM_S
    run_s: float = RUN_S
    seed: int = 0
    progress: Callable[[str], None] = lambda line: None
    model: str = "deepseek-v3-2"
    sizes: tuple[int, int] = (2, 4)
    workload: str = "agents-64k"
    _runs: dict[tuple[str, float], Service] = field(default_factory=dict)

    def served(self, system: str, agents_per_s: float) -> Service:
        """One run; each is made once."""
        key = system, agents_per_s
        if key not in self._runs:
            site = deployment(self.model, prefill_nodes=self.sizes[0], decode_nodes=self.sizes[1])
            run = serve(
                SYSTEMS[system],
                site,
                agent_set(self.workload),
                agents_per_s=agents_per_s,
                seed=self.seed,
                warm_s=self.warm_s,
                run_s=self.run_s,
            )
            self.progress(f"{system}, {agents_per_s} agents/s: TTFT {run.ttft_s:.2f} s, simulated")
            self._runs[key] = run
        return self._runs[key]

    def figures(self) -> Iterator[Figure]:
        for system in COMPARED:
            for rate in self.rates:
                yield from _rows(SYSTEMS[system].title, self.served(system, rate), self._where)
        yield from self._comparisons()

    def by_system(self) -> dict[str, list[Service]]:
        """The runs of all rates, by the title of the system."""
        return {SYSTEMS[name].title: [self.served(name, rate) for rate in self.rates] for name in COMPARED}

    @property
    def _where(self) -> str:
        return f"{DUALPATH}, online serving: latencies by arrival rate; plotted there, no figure in the review"

    def _comparisons(self) -> Iterator[Figure]:
        """At rates that both systems serve within the SLO, so that queues say nothing."""
        both = [rate for rate in self.rates if all(self.served(system, rate).meets_slo for system in COMPARED)]
        if not both:
            return
        for name, claim, note, of in (
            (
                "time to the second token",
                "TTST comparable to Basic",
                "our Basic hands a prompt's KV over when all of it is computed, DualPath layer by layer; how the "
                "source's Basic does is not in the review",
                lambda run: run.ttst_s,
            ),
            ("time per output token", "no increase", "", lambda run: run.tpot_s),
        ):
            ratios = [of(self.served("dualpath", rate)) / of(self.served("basic", rate)) for rate in both]
            yield Figure(
                name=f"{name}, DualPath over Basic, largest of {len(both)} rates",
                published=1.0,
                simulated=max(ratios, key=lambda ratio: abs(ratio - 1)),
                unit="x",
                source=f"{DUALPATH}, online serving: {claim}",
                within=0.15,
                note=note,
            )
        yield from self._growth()

    def _growth(self) -> Iterator[Figure]:
        """How much of what a rate adds to the first token is queueing, up to the rate that Basic cannot serve."""
        beyond = next((rate for rate in self.rates if not self.served("basic", rate).meets_slo), None)
        if beyond is None:
            return
        for system in COMPARED:
            calm, full = self.served(system, self.rates[0]), self.served(system, beyond)
            yield Figure(
                name=f"queueing at {beyond} over {self.rates[0]} agents/s, {SYSTEMS[system].title}",
                published=None,
                simulated=full.queued_s - calm.queued_s,
                unit="s more",
                source=f"{DUALPATH}: Basic's queueing grows dramatically, DualPath's parts stay",
                note=f"reading {calm.parts_s[Part.READ]:.3f} s to {full.parts_s[Part.READ]:.3f} s, "
                f"computing {calm.parts_s[Part.COMPUTE]:.3f} s to {full.parts_s[Part.COMPUTE]:.3f} s",
            )


def _rows(title: str, run: Service, source: str) -> Iterator[Figure]:
    """One row for each latency of a run."""
    values = {
        "TTFT": run.ttft_s,
        **{f"TTFT, {part.value}": value_s for part, value_s in run.parts_s.items()},
        "hand-over": run.hand_over_s,
        "TTST": run.ttst_s,
        "TPOT": run.tpot_s,
    }
    for name, value_s in values.items():
        yield Figure(
            name=f"{run.agents_per_s} agents/s, {title}: mean {name}",
            published=None,
            simulated=1e3 * value_s,
            unit="ms",
            source=source,
        )
