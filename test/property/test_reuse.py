# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of reuse, against sets and an exact cache, on drawn prompts."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan import _native
from banyan.telemetry import NodeReuse, PromptAnswer
from benchmark.ceiling import Player, Prompt, exact_ceiling, exact_found

PAGE = 16
NAMES = [_native.page_numbers([hashlib.sha256(str(page).encode()).hexdigest()]) for page in range(2_000)]


@st.composite
def conversations(draw):
    """Turns of some conversations in any order, a second to half an hour apart."""
    turns, lens, at_s = [], {}, 0.0
    for which, grown, pause_s in draw(
        st.lists(
            st.tuples(st.integers(0, 9), st.integers(1, 12), st.sampled_from([1.0, 70.0, 1_800.0])),
            min_size=1,
            max_size=60,
        )
    ):
        lens[which] = min(lens.get(which, 0) + grown, 200)
        pages = (*range(4), *range(4 + 190 * which, 4 + 190 * which + min(lens[which], 180)))
        turns.append(Prompt(at_s, PAGE * len(pages) + which, pages))
        at_s += pause_s
    return turns


def played(prompts, node_pages, seed):
    player = Player(prompts, PAGE, node_pages, seed)
    player.play(NAMES)
    return player.reuse.figures(lambda times: times * node_pages)


@given(conversations(), st.integers(0, 2**64 - 1))
def test_ceiling_when_prompts_are_any_then_it_is_that_of_a_cache_that_loses_nothing(prompts, seed):
    told = played(prompts, 1_000, seed)
    for end, minutes in (("15m", 15), ("1h", 60), ("24h", 1_440)):
        exact = exact_ceiling(prompts, PAGE, minutes)
        # Of few pages two may be taken for one.
        assert told[f"hit_ceiling_{end}"] == pytest.approx(exact, abs=max(0.03, 32 / prompts[-1].num_tokens))


@given(conversations(), st.sampled_from([10, 40, 150, 600]), st.integers(0, 2**64 - 1))
def test_curve_when_all_pages_are_sampled_then_it_is_that_of_an_exact_cache(prompts, node_pages, seed):
    told = played(prompts, node_pages, seed)
    for word, times in (("half", 0.5), ("same", 1.0), ("double", 2.0)):
        # Distances are told apart by a twelfth.
        sizes = [max(0, int(times * node_pages * off)) for off in (0.9, 1.1)]
        least, most = (exact_found(prompts, PAGE, size) for size in sizes)
        assert least - 0.01 <= told[f"hit_share_{word}"] <= most + 0.01


@given(st.binary(max_size=400), st.integers(0, 2**62), st.integers(0, 2**62))
def test_reuse_when_anything_is_told_then_shares_are_shares(noise, num_tokens, num_pages):
    reuse = NodeReuse(PAGE, 1, 0, lambda: 1e9)
    pages = noise[: len(noise) // 8 * 8]
    reuse.asked(pages)
    reuse.came(pages)
    reuse.answered(PromptAnswer(num_tokens, num_pages, pages))
    told = reuse.figures(lambda times: times)
    assert all(0.0 <= share <= 1.0 for name, share in told.items() if name.startswith("hit_"))
