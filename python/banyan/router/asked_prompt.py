# SPDX-License-Identifier: Apache-2.0
"""A request, and what of its prompt is compared with what servers hold."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from banyan.router.blocks import block_ids, salt_digests
from banyan.router.prompt import Request
from banyan.routing.sent import BYTES_PER_TOKEN, MOST_PIECES, piece_ids


@dataclass(frozen=True)
class Asked:
    """A request with what was found out about it: ``token_ids`` are those of its prompt, None when not known;
    ``held_at`` is the server that has what it goes on from."""

    request: Request
    token_ids: array[int] | None = None
    held_at: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether anything of its prompt can be compared."""
        return self.token_ids is not None or self.request.text is not None

    @property
    def num_tokens(self) -> int:
        """Of the whole batch; guessed from the text if need be. One at least: of nothing every server would have as
        much to do."""
        num_bytes = len(self.request.text or b"") if self.token_ids is None else BYTES_PER_TOKEN * len(self.token_ids)
        return max(1, (num_bytes + self.request.num_more_bytes) // BYTES_PER_TOKEN)

    def names(self, block_tokens: int) -> list[array[int]]:
        """Ids of the prompt's blocks of that size, by each chain, for targets whose events name them."""
        assert self.token_ids is not None
        if block_tokens not in self._names:
            self._names[block_tokens] = [block_ids(self.token_ids, block_tokens, digest) for digest in self._digests]
        return self._names[block_tokens]

    @cached_property
    def _names(self) -> dict[int, list[array[int]]]:
        return {}

    @cached_property
    def _digests(self) -> tuple[bytes | None, ...]:
        return salt_digests(self.request.cache_salt)

    @property
    def prior(self) -> bytes | None:
        """What the chain of its pages starts from."""
        return self._digests[0]

    @cached_property
    def pieces(self) -> list[bytes]:
        """Of the prompt, for targets that do not tell what they hold."""
        row = self.request.row()
        return list(islice(piece_ids(row, self.request.namespace.encode()), MOST_PIECES)) if row is not None else []

    def hash_now(self, block_sizes: Iterable[int]) -> None:
        """All that is compared, and not when somebody first asks for it: a long prompt takes so long that this is done
        where nobody waits for it."""
        _ = self.pieces, self.prior
        if self.token_ids is not None and self.request.is_salted_only:
            for block_tokens in block_sizes:
                self.names(block_tokens)
