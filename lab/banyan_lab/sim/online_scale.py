# SPDX-License-Identifier: Apache-2.0
"""DualPath's online figure at scale: from 0.4 agents/s on 2P4D to 8.8 on 44P88D, with stable latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from banyan_lab.sim.figures import DUALPATH, Figure, relative
from banyan_lab.sim.online import Service, capacity, serve
from banyan_lab.sim.systems import SYSTEMS, Deployment, deployment
from banyan_lab.sim.workload import agent_set

NUM_GROUPS = 22
SMALL_RATE, LARGE_RATE = 0.4, 8.8
WARM_S, RUN_S = 200.0, 400.0
"""Shorter than a run of one group: 44P88D serves 22 times as many turns a second."""

SOURCE = f"{DUALPATH}, large scale: 22x, 0.4 to 8.8 agents/s from 2P4D to 44P88D, latency stable"


@dataclass(frozen=True)
class OnlineScale:
    """``num_groups`` of 2P4D against one. The source does not say which set was served: 64K is assumed."""

    num_groups: int = NUM_GROUPS
    warm_s: float = WARM_S
    run_s: float = RUN_S
    seed: int = 0
    workload: str = "agents-64k"
    progress: Callable[[str], None] = lambda line: None

    def _site(self, num_groups: int) -> Deployment:
        return deployment("deepseek-v3-2", prefill_nodes=2, decode_nodes=4, num_groups=num_groups)

    def served(self, num_groups: int, agents_per_s: float) -> Service:
        run = serve(
            SYSTEMS["dualpath"],
            self._site(num_groups),
            agent_set(self.workload),
            agents_per_s=agents_per_s,
            seed=self.seed,
            warm_s=self.warm_s,
            run_s=self.run_s,
        )
        self.progress(
            f"{self._site(num_groups).title}, {agents_per_s:.2f} agents/s: TTFT {run.ttft_s:.3f} s, "
            f"TPOT {1e3 * run.tpot_s:.1f} ms, {run.num_turns} turns simulated"
        )
        return run

    def most(self) -> float:
        """Agents per second of 2P4D within the SLO."""
        return capacity(
            SYSTEMS["dualpath"],
            self._site(1),
            agent_set(self.workload),
            low=0.5,
            high=1.0,
            seed=self.seed,
            warm_s=self.warm_s,
            run_s=self.run_s,
        )

    def multiple(self, small_rate: float) -> float:
        """How many times that rate the large cluster serves within the SLO, in steps of a tenth of its groups."""
        tenths = 10
        if self._meets(small_rate, tenths):
            while self._meets(small_rate, tenths + 1):
                tenths += 1
        else:
            tenths -= 1
            while not self._meets(small_rate, tenths):
                tenths -= 1
        return self.num_groups * tenths / 10

    def _meets(self, small_rate: float, tenths: int) -> bool:
        return self.served(self.num_groups, small_rate * self.num_groups * tenths / 10).meets_slo

    def figures(self) -> Iterator[Figure]:
        per_group = LARGE_RATE / NUM_GROUPS
        small, large = self.served(1, SMALL_RATE), self.served(self.num_groups, per_group * self.num_groups)
        title = self._site(self.num_groups).title
        for name, ratio in (
            ("TTFT", large.ttft_s / small.ttft_s),
            ("TTST", large.ttst_s / small.ttst_s),
            ("TPOT", large.tpot_s / small.tpot_s),
        ):
            yield Figure(
                name=f"660B: mean {name}, {title} at {large.agents_per_s:.2f} over 2P4D at {SMALL_RATE} agents/s",
                published=1.0,
                simulated=ratio,
                unit="x",
                source=SOURCE,
                within=0.15,
                note=f"TTFT {small.ttft_s:.3f} s to {large.ttft_s:.3f} s; 'stable', no number is published",
            )
        most = self.most()
        multiple = self.multiple(most)
        yield Figure(
            name=f"660B: agents per second within the SLO, {title} over 2P4D",
            published=float(NUM_GROUPS) if self.num_groups == NUM_GROUPS else None,
            simulated=multiple,
            unit="x",
            source=SOURCE,
            within=relative(NUM_GROUPS, 0.15),
            note=f"{most:.2f} and {multiple * most:.1f} agents/s, tried in steps of a tenth",
        )
        yield Figure(
            name=f"660B {title}: agents per second within the SLO",
            published=LARGE_RATE if self.num_groups == NUM_GROUPS else None,
            simulated=multiple * most,
            unit="1/s",
            source=SOURCE,
            within=relative(LARGE_RATE, 0.15),
            note="absolute rates hinge on the achieved prefill rate, as those of 2P4D do",
        )
