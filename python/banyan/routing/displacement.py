# SPDX-License-Identifier: Apache-2.0
"""What a request costs others where its prefix is not: the pages that its own push out.

While a rank has room for them that is nothing, and policies are what they are without this term. Where all pools are
full, every page that is brought to a rank pushes another one out, which somebody may have to compute again. Then a
request costs least where its prefix lies: affinity, as strong as memory is short, and no mode that anybody switches.
"""

from __future__ import annotations

from banyan.routing.view import Query, RankState

TIMES_LOST = 2
"""What is pushed out and wanted again is computed, and pushes out something else."""


def displaced(query: Query, state: RankState) -> int:
    """Tokens that others will have to compute for it when the request runs there."""
    if state.unused_tokens is None:
        return 0
    return TIMES_LOST * max(0, query.new_on(state.rank) - state.unused_tokens)
