# SPDX-License-Identifier: Apache-2.0
"""Vectors over prefixes from another rank are those over the rank's own cached prefix, bit for bit.

A cached prefix may round otherwise than a computed one, in stock too (docs/design/0003), so equal things are compared:
each prompt is asked three times, and the ranks take turns. The first time it is computed, the second time its prefix
comes from the first rank, the third time the first rank has it. Copies are late, so that a forward which does not wait
for them reads none of the pages.
"""

import pytest
from test.e2e.conftest import Client
from test.e2e.late_copies.late import plugin

from benchmark.modes import asking, models
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.further]
PAGE = 16
FLAGS = ("--device", "cpu", "--is-embedding", "--max-total-tokens", "8000", "--sleep-on-idle", "--banyan-plan", "move")


@pytest.fixture(scope="module")
def embedder(alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedding")
    env = (*cpu_env(dp=2), ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1"), *plugin(folder / "late"))
    with ForkedServer(ServerSpec("embedding", 2, "on", FLAGS, env), models.ensure(models.LLAMA), folder) as server:
        wait_ready([server])
        yield Client(server)


def test_vector_when_the_prefix_is_fetched_then_it_is_that_of_the_owner_s_hit(embedder):
    ask = asking.vectors(embedder.server.url)
    asked = asking.prompts()
    for ids in asked:
        before = embedder.total("fetched_pages")
        computed = ask(ids, None).said
        fetched = ask(ids, None).said
        assert embedder.total("fetched_pages") - before == (len(ids) - 1) // PAGE
        own = ask(ids, None).said
        assert embedder.total("fetched_pages") - before == (len(ids) - 1) // PAGE, "the third time it was fetched again"
        assert fetched == own
        assert sum(one * other for one, other in zip(computed, fetched, strict=True)) == pytest.approx(1, abs=0.02)
    assert embedder.total("fetches_failed") == 0
