# SPDX-License-Identifier: Apache-2.0
"""What each of Banyan's hooks takes of the scheduler threads of a running server, as the server counts it itself.

    banyan bench hooks --url http://127.0.0.1:30000

``/server_info`` is asked twice, and what came between is told: ask it something meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from banyan.cli.engine import Engine

SECONDS = 10.0
STEP = "linker.num_completed_offloads"
"""Called once in each of the scheduler's steps."""

REQUEST = "core.30-request-created"
"""Called once for each request."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a hook took itself, without what it called of SGLang's."""

    num_calls: int
    own_us: int

    @property
    def us_a_call(self) -> float:
        return self.own_us / self.num_calls if self.num_calls else 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Of all ranks of a server since its start, or between two looks at it, in microseconds."""

    control_us: int = 0
    dispatch_us: int = 0
    hooks: Mapping[str, Spent] = field(default_factory=dict)

    @classmethod
    def of(cls, server_info: Mapping[str, Any]) -> Costs:
        """From an answer of ``/server_info``; nothing of a server that shares nothing."""
        states = [state.get("banyan", {}) for state in server_info.get("internal_states", ())]
        names = {name for state in states for name in state.get("hooks", {})}

        def total(name: str, figure: str) -> int:
            return sum(state.get("hooks", {}).get(name, {}).get(figure, 0) for state in states)

        return cls(
            sum(state.get("control_us", 0) for state in states),
            sum(state.get("dispatch_us", 0) for state in states),
            {name: Spent(total(name, "num_calls"), total(name, "own_us")) for name in names},
        )

    def since(self, earlier: Costs) -> Costs:
        """What came after ``earlier``: of hooks that were called."""
        never = Spent(0, 0)
        hooks = {
            name: Spent(
                spent.num_calls - earlier.hooks.get(name, never).num_calls,
                spent.own_us - earlier.hooks.get(name, never).own_us,
            )
            for name, spent in self.hooks.items()
        }
        return Costs(
            self.control_us - earlier.control_us,
            self.dispatch_us - earlier.dispatch_us,
            {name: spent for name, spent in sorted(hooks.items()) if spent.num_calls},
        )

    @property
    def num_steps(self) -> int:
        """Steps of all schedulers."""
        return self.hooks[STEP].num_calls if STEP in self.hooks else 0

    @property
    def num_requests(self) -> int:
        return self.hooks[REQUEST].num_calls if REQUEST in self.hooks else 0


def run(url: str, *, api_key: str | None = None, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """One row for each hook that was called meanwhile, and one for all of them.

    Raises:
        EngineError: when the server does not answer.
    """
    engine = Engine(url, api_key=api_key)
    before = Costs.of(engine.server_info())
    time.sleep(seconds)
    return rows(Costs.of(engine.server_info()).since(before))


def rows(costs: Costs) -> list[dict[str, Any]]:
    """The dearest first."""
    num_steps, num_requests = max(costs.num_steps, 1), max(costs.num_requests, 1)
    hooks = sorted(costs.hooks.items(), key=lambda item: -item[1].own_us)
    return [
        *(
            {
                "hook": name,
                "num_calls": spent.num_calls,
                "us_a_call": spent.us_a_call,
                "us_a_step": spent.own_us / num_steps,
                "us_a_request": spent.own_us / num_requests,
            }
            for name, spent in hooks
        ),
        {
            "hook": "all",
            "num_steps": costs.num_steps,
            "num_requests": costs.num_requests,
            "us_a_step": costs.control_us / num_steps,
            "us_a_request": costs.control_us / num_requests,
            "dispatcher_us_a_request": costs.dispatch_us / num_requests,
        },
    ]
