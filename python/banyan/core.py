# SPDX-License-Identifier: Apache-2.0
"""The vocabulary that every package shares. Values only: no behaviour, no imports from Banyan.

The words are those of ``docs/glossary.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

PageKey = NewType("PageKey", str)
"""Content address of a page: 64 hex characters of SGLang's chained sha256 page hash."""


@dataclass(frozen=True, slots=True)
class PrefixSpan:
    """How long a prefix of one request is cached, and where, in tokens.

    ``origin_tokens`` is what this rank's own tree holds; ``max_tokens`` what the best placement over all ranks
    gives; ``max_rank`` the rank that supplies most of the difference (this rank when there is none).
    """

    origin_tokens: int
    max_tokens: int
    max_rank: int
