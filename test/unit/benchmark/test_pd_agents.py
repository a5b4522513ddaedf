# SPDX-License-Identifier: Apache-2.0
import asyncio
import random
import time

import pytest

from benchmark import pd_agents
from benchmark.modes.models import VOCABULARY
from benchmark.pd_agents import Played, Sizes
from benchmark.records import Answer

SIZES = Sizes(num_agents=2, num_turns=3, first_tokens=40, added_tokens=10, answer_tokens=4)


class Client:
    """Answers each prompt with four tokens, half a millisecond apart."""

    def __init__(self, error=""):
        self.asked = []
        self.error = error

    async def answer(self, messages, token_ids, output_len):
        self.asked.append(token_ids)
        return Answer(ttft_s=0.1, itl_s=[0.5] * 3, output_ids=[7] * output_len, cached_tokens=16, error=self.error)


def test_agent_when_it_goes_on_then_each_prompt_begins_with_the_one_before_and_its_answer():
    client = Client()
    played = asyncio.run(pd_agents.play(client, random.Random(1), SIZES, [0.0] * 3))
    assert [len(ids) for ids in client.asked] == [40, 54, 68]
    assert client.asked[1][:44] == [*client.asked[0], 7, 7, 7, 7]
    assert max(map(max, client.asked)) < VOCABULARY
    assert len(played.itl_s) == 9 and played.found_tokens == 48


def test_agent_when_a_turn_fails_then_nothing_is_measured():
    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(pd_agents.play(Client("gone"), random.Random(1), SIZES, [0.0] * 3))


def test_agent_when_its_turns_have_times_then_none_begins_before_its_own():
    client = Client()
    start_s = time.perf_counter()
    played = asyncio.run(pd_agents.play(client, random.Random(1), SIZES, [0.0, 0.02, 0.04]))
    assert time.perf_counter() - start_s >= 0.04
    assert 0 <= played.latest_s < 0.02


def test_sizes_when_agents_are_paced_then_turns_come_at_one_rate():
    sizes = Sizes(num_agents=3, num_turns=2, turns_per_s=2.0)
    due_s = sorted(sizes.due_s(agent, turn) for agent in range(3) for turn in range(2))
    assert due_s == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


def test_figures_when_rounds_differ_then_the_median_of_their_ratios():
    def rows(number, on_s, off_s, load="hurried"):
        return [
            pd_agents.row_of(
                load, number, kind, [Played(duration_s, [duration_s / 100, duration_s / 50])], {"prefill": 1}
            )
            for kind, duration_s in (("on", on_s), ("off", off_s))
        ]

    found = pd_agents.figures({"rows": [*rows(0, 1.0, 4.0), *rows(1, 3.0, 4.0), *rows(0, 2.0, 2.0, "paced")]})
    assert found["agents_jct_ratio"]["median"] == 0.5
    assert found["tpot_ratio_hurried"]["median"] == pytest.approx(0.5)
    assert found["tpot_ratio"]["median"] == pytest.approx(1.0)
