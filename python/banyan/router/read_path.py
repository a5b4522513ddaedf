# SPDX-License-Identifier: Apache-2.0
"""Who reads what of a prompt that goes to a pair, and what has been given to each server to read.

A server's read queue is what it reports, or what this router has given it for requests that are under way, whichever is
more: a report does not know yet what was sent a moment ago, and does not tell how much of it is this router's. What
has been read since the report is subtracted from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from banyan.router.fleet import Server
from banyan.routing.hint import ReadHint
from banyan.routing.reads import ReadQueue, decode_part


@dataclass(eq=False)
class ReadPath:
    """What the servers of a pair are to read of one prompt: the prefill server so many tokens from ``start`` on, the
    decode server so many behind them. They count as theirs until ``release``."""

    prefill: Server
    decode: Server
    start: int
    num_prefill_tokens: int
    num_decode_tokens: int
    is_released: bool = False

    def __post_init__(self) -> None:
        for server, num_tokens in self._parts():
            server.num_given_tokens += num_tokens

    def release(self) -> None:
        """Both have read it, or will not. Twice is fine."""
        if not self.is_released:
            self.is_released = True
            for server, num_tokens in self._parts():
                server.num_given_tokens -= num_tokens
                server.num_read_tokens += num_tokens

    def _parts(self) -> tuple[tuple[Server, int], ...]:
        return (self.prefill, self.num_prefill_tokens), (self.decode, self.num_decode_tokens)

    @property
    def hint(self) -> ReadHint | None:
        """What the prefill server is told; None where it reads all, as it does by itself."""
        if not self.num_decode_tokens:
            return None
        # Where decode reads all, also what was not known to be stored.
        first_token = self.start + self.num_prefill_tokens if self.num_prefill_tokens else 0
        return ReadHint(str(self.decode.description.lends_at), first_token)


def read_path(prefill: Server, decode: Server, *, start: int, end: int) -> ReadPath:
    """Who reads the tokens from ``start`` to ``end``, which the store is expected to hold."""
    num_tokens = max(0, end - start)
    num_decode_tokens = 0
    if can_read_for(decode, prefill):
        queue = replace(_queue(decode), most_tokens=decode.description.most_read_tokens)
        num_decode_tokens = decode_part(num_tokens, prefill=_queue(prefill), decode=queue)
    return ReadPath(prefill, decode, start, num_tokens - num_decode_tokens, num_decode_tokens)


def said_of(prefill: Server, decode: Server) -> str | None:
    """Whether the decode server reads for the prefill server; None where nobody has asked for that, or where one of
    them has not said anything yet."""
    asking, asked = prefill.description, decode.description
    if not asking.has_others_read or not asking.borrows_from or not asked.most_read_tokens:
        return None
    if can_read_for(decode, prefill):
        return f"{decode.url} reads parts of prompts for {prefill.url}"
    return (
        f"{decode.url} does not read for {prefill.url}: its page server is {asked.lends_at}, and the other's "
        f"--banyan-peers are {', '.join(map(str, asking.borrows_from))}"
    )


def can_read_for(decode: Server, prefill: Server) -> bool:
    """Whether both have been told to."""
    asking, asked = prefill.description, decode.description
    return asking.has_others_read and asked.most_read_tokens > 0 and asked.lends_at in asking.borrows_from


def _queue(server: Server) -> ReadQueue:
    num_reported = server.reads.num_tokens - server.num_read_tokens
    return ReadQueue(max(num_reported, server.num_given_tokens), server.reads.tokens_per_s)
