# SPDX-License-Identifier: Apache-2.0
"""Where a server is to take from what it lacks of a prompt: which other node's arena has more of it.

Invariants
  1. Named is only a page server that the server may ask by itself. The server asks there, and the remote lease is the
     truth.
  2. That nobody has more is said only where it is known of every page server that the server would ask.

Pages of pools are not lent: what counts is what a server's arena holds, all its ranks' parts together.
"""

from __future__ import annotations

from collections.abc import Sequence

from banyan.core import Address
from banyan.router.asked_prompt import Asked
from banyan.router.blocks import held_in_arena, leading_blocks
from banyan.router.fleet import Server
from banyan.router.health import State
from banyan.routing.hint import SourceHint


def source_of(server: Server, asked: Asked, others: Sequence[Server], *, held_tokens: int) -> SourceHint | None:
    """Whose arena has more of the prompt than the ``held_tokens`` that ``server`` has; of equally long prefixes the one
    with the fewest requests. None where nothing can be said: the server asks by itself."""
    description = server.description
    if not description.borrows_from or not _is_named_by_tokens(asked):
        return None
    lenders = _lenders(server, others)
    names = asked.names(description.block_tokens) if lenders else []
    arenas = [held_in_arena([feed.blocks for feed in lender.feeds]) for lender in lenders.values()]
    lengths = [leading_blocks(names, arena) for arena in arenas]
    best = max(
        zip(lengths, lenders, strict=True),
        key=lambda found: (found[0], -len(lenders[found[1]].in_flight)),
        default=None,
    )
    if best is not None and best[0] * description.block_tokens > held_tokens:
        return SourceHint((best[1],))
    page_servers = [page_server for page_server in description.borrows_from if page_server != description.lends_at]
    return SourceHint(()) if _is_known(page_servers, lenders) else None


def _is_named_by_tokens(asked: Asked) -> bool:
    """Whether it is known how events name the arena's pages of this prompt. A batch is more than one prompt."""
    request = asked.request
    return asked.token_ids is not None and request.is_salted_only and request.num_others == 0


def _lenders(server: Server, others: Sequence[Server]) -> dict[Address, Server]:
    """The servers that this one can take pages from, and that tell what they have, by their page servers."""
    description = server.description
    lenders = {}
    for other in others:
        said = other.description
        if other is server or other.health.state is not State.UP or not said.tells_arena:
            continue
        if said.lends_at in description.borrows_from and 0 < said.block_tokens == description.block_tokens:
            lenders[said.lends_at] = other
    return {page_server: other for page_server, other in lenders.items() if page_server is not None}


def _is_known(page_servers: Sequence[Address], lenders: dict[Address, Server]) -> bool:
    """Whether all that is held at these page servers is known."""
    return all(
        page_server in lenders and all(feed.is_whole for feed in lenders[page_server].feeds)
        for page_server in page_servers
    )
