# SPDX-License-Identifier: Apache-2.0
"""What each target may hold, guessed from what was sent there: for servers without KV events, for prompts whose tokens
are not known, and for ranks on other nodes than the dispatcher.

A prompt is a row of bytes, cut into pieces of ``PIECE_BYTES``; a piece's id is chained to the one before. The least
recently sent pieces are forgotten first, at about the number of tokens that the target has room for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from banyan.latest import Latest

PIECE_BYTES = 256
MOST_PIECES = 1 << 13
"""That are compared of one prompt: half a million tokens. It is not to push all others out of what was sent to a
target."""

BYTES_PER_TOKEN = 4
"""Exact for packed token ids; for text the usual rule of thumb."""

PIECE_TOKENS = PIECE_BYTES // BYTES_PER_TOKEN
DEFAULT_CAPACITY_TOKENS = 1 << 22
"""For a target that does not say how much it has room for."""

MOST_TOKENS = 1 << 25
"""That are remembered of one target, whatever it says: 100 MB. In 128 GB so many tokens would have 4 KB each."""


def piece_ids(prompt: bytes, namespace: bytes = b"") -> Iterator[bytes]:
    """Ids of the full pieces. Different namespaces have no id in common."""
    digest = hashlib.blake2b(namespace, digest_size=16).digest()
    for start in range(0, len(prompt) - PIECE_BYTES + 1, PIECE_BYTES):
        digest = hashlib.blake2b(prompt[start : start + PIECE_BYTES], digest_size=16, key=digest).digest()
        yield digest


class SentPieces:
    """The pieces that went to one target, the latest last."""

    def __init__(self, capacity_tokens: int = DEFAULT_CAPACITY_TOKENS) -> None:
        self._pieces: Latest[bytes, None] = Latest(max(1, capacity_tokens // PIECE_TOKENS))

    def has_room_for(self, capacity_tokens: int) -> None:
        """So much is what the target holds."""
        self._pieces.most = max(1, min(capacity_tokens, MOST_TOKENS) // PIECE_TOKENS)

    def __len__(self) -> int:
        return len(self._pieces)

    def leading_tokens(self, ids: list[bytes]) -> int:
        """Tokens of the longest leading run that was sent here."""
        num_pieces = 0
        for piece in ids:
            if piece not in self._pieces:
                break
            num_pieces += 1
        return num_pieces * PIECE_TOKENS

    def sent(self, ids: list[bytes]) -> None:
        """Take note. The front of a prompt is forgotten last: without it the rest is of no use."""
        for piece in reversed(ids):
            self._pieces.put(piece, None)

    def forget(self) -> None:
        self._pieces.clear()
