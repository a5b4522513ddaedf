# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest

from banyan_lab.replay import sharing_of
from banyan_lab.sim import h20
from banyan_lab.sim.coders import GROWTH_TOKENS, MAX_TOKENS


@pytest.mark.parametrize("shape", [h20.DENSE, h20.LEGACY])
def test_coders_when_drawn_then_an_infinite_cache_has_the_published_share(shape):
    traces = [shape.trace(seed) for seed in range(3)]
    shares = [sharing_of(trace).shared_ratio for trace in traces]
    assert sum(shares) / len(shares) == pytest.approx(shape.reusable_share, abs=0.04)


def test_coders_when_drawn_then_as_many_and_as_long_as_asked():
    """Prompts that would be longer than the servers allow are left out, which costs some of the mean."""
    trace = h20.DENSE.trace()
    tokens = [request.num_input_tokens for request in trace.requests]
    assert len(tokens) == pytest.approx(912, rel=0.1) and max(tokens) < MAX_TOKENS
    assert sum(tokens) / len(tokens) == pytest.approx(h20.DENSE.mean_input_tokens, rel=0.2)
    assert trace.requests == h20.DENSE.trace().requests != h20.DENSE.trace(seed=1).requests


def test_coders_when_a_session_goes_on_then_it_grows_behind_what_it_had():
    sessions = [turns for turns in h20.DENSE.trace().sessions().values() if len(turns) > 1]
    grown = [b.num_input_tokens - a.num_input_tokens for turns in sessions for a, b in pairwise(turns)]
    assert sum(grown) / len(grown) == pytest.approx(GROWTH_TOKENS, rel=0.2)
    for turns in sessions[:20]:
        first, second = list(turns[0].block_ids()), list(turns[1].block_ids())
        assert second[: len(first)] == first
