# SPDX-License-Identifier: Apache-2.0
"""The prefix hint: what the dispatcher saw and decided, carried to the rank in SGLang's ``kv_hints``.

A hint is advice. The rank looks again before it promises anything, because pages may have moved meanwhile.

A router may add which node's arena has more of the prompt (``SOURCE_ACTION``), and one of pairs which node reads the
last part of it from its store (``READ_ACTION``). In the other direction a client may name a policy for its request
(``POLICY_ACTION``): that is how policies are compared on one running server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import msgspec

from banyan.core import Address
from banyan.routing.view import Reason

ACTION_TYPE = "banyan.prefix"
ACTION_VERSION = "1"

POLICY_ACTION = "banyan.policy"
"""Action type of a client's wish; its payload is ``{"policy": NAME}``."""

READ_ACTION = "banyan.read"
"""Action type of ``ReadHint``."""

SOURCE_ACTION = "banyan.source"
"""Action type of ``SourceHint``."""

SESSION_ACTION = "banyan.session"
"""Action type of the name of a request's conversation, ``{"name": HASH}``: what its client says of it by the way."""

OWN_ACTIONS = frozenset({ACTION_TYPE, READ_ACTION, SOURCE_ACTION, SESSION_ACTION})
"""What only a server's own processes say to each other. The seam marks it with what no client knows."""

TEXT = "text"
"""Field of the payloads of ``READ_ACTION`` and ``SOURCE_ACTION``: what the header said."""

NOBODY = "none"
"""In a header, in place of a page server."""

MAX_HEADER_BYTES = 4000
"""Of a header that is read. Python takes no number of more than 4,300 digits."""


class Until(StrEnum):
    """What ended the wait of a request that the dispatcher held back for a prefix that a rank was computing."""

    LANDED = "landed"
    """Its rank can fetch what was waited for."""
    GIVEN_UP = "given_up"
    """The rank that was to compute it has nothing to do any more, or has done more, and the pages are not there."""
    LATE = "late"
    ABORTED = "aborted"
    INACTIVE = "inactive"
    """A rank that was waited for is no longer active, or stands still; the policy has chosen anew."""
    FAILED = "failed"
    """It could not be told whether the wait was over; the log says why."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Why the request went where it went.

    ``policy`` is a name of ``POLICIES``; ``dispatch_us`` what it took. After a wait ``held_us`` is
    how long the dispatcher held the request back, and ``held_until`` what ended that.
    """

    policy: str
    reason: Reason
    num_hot_ranks: int
    dispatch_us: int
    held_us: int = 0
    held_until: str = ""


@dataclass(frozen=True, slots=True)
class PrefixHint:
    """The longest cached prefix over all ranks at dispatch, in tokens, and its holder (-1: nobody).

    ``decision`` is None when SGLang or the client chose the rank.
    """

    max_tokens: int
    max_rank: int
    decision: Decision | None = None

    @classmethod
    def from_tokens_by_rank(cls, tokens_by_rank: Sequence[int], decision: Decision | None = None) -> PrefixHint:
        """Pick the holder of the longest prefix; the lowest rank wins a tie."""
        longest = max(tokens_by_rank, default=0)
        return cls(longest, list(tokens_by_rank).index(longest) if longest else -1, decision)

    def payload(self) -> dict[str, object]:
        payload: dict[str, object] = {"dp_max_kv_len": self.max_tokens, "dp_max_kv_rank": self.max_rank}
        return payload if self.decision is None else {**payload, **asdict(self.decision)}

    @classmethod
    def from_payload(cls, payload: Mapping[str, object]) -> PrefixHint | None:
        """Read a payload that crossed a process border; None when it is not one of ours."""
        tokens, rank = payload.get("dp_max_kv_len"), payload.get("dp_max_kv_rank")
        if not isinstance(tokens, int) or not isinstance(rank, int) or tokens < 0:
            return None
        return cls(tokens, rank, _decision(payload))


@dataclass(frozen=True, slots=True)
class ReadHint:
    """Who reads what of a prompt from its store: the node whose page server is at ``node`` the tokens from
    ``first_token`` on, who gets the request what it lacks before them."""

    node: str
    first_token: int

    def text(self) -> str:
        """As it travels: in a header to the server, in a payload (``TEXT``) to its ranks."""
        return f"{self.node} {self.first_token}"

    @classmethod
    def read(cls, text: object) -> ReadHint | None:
        """None when it is not one of ours."""
        if not isinstance(text, str) or len(text) > MAX_HEADER_BYTES:
            return None
        node, _, first = text.partition(" ")
        return cls(node, int(first)) if node and first.isascii() and first.isdecimal() else None


@dataclass(frozen=True, slots=True)
class SourceHint:
    """Whose arenas have more of a prompt than the server that gets it: the page servers of their nodes; none where no
    node has."""

    page_servers: tuple[Address, ...]

    def text(self) -> str:
        """As that of ``ReadHint``."""
        return ",".join(map(str, self.page_servers)) or NOBODY

    @classmethod
    def read(cls, text: object) -> SourceHint | None:
        """None when it is not one of ours."""
        if not isinstance(text, str) or len(text) > MAX_HEADER_BYTES:
            return None
        try:
            return cls(tuple(map(Address.parse, [] if text == NOBODY else text.split(","))))
        except ValueError:
            return None


def _decision(payload: Mapping[str, object]) -> Decision | None:
    try:
        return msgspec.convert(payload, Decision)
    except msgspec.ValidationError:
        return None
