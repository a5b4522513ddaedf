# SPDX-License-Identifier: Apache-2.0
"""The vocabulary that every package shares. Values only: no imports from Banyan.

The words are those of ``docs/glossary.md``.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import NewType

PageKey = NewType("PageKey", str)
"""Content address of a page: 64 hex characters of SGLang's chained sha256 page hash."""

MAX_RANKS = 1024
"""Of one server: whoever says more is no server, and each gets a row in the policies' table."""


@dataclass(frozen=True, slots=True)
class PrefixSpan:
    """How long a prefix of one request is cached, and where, in tokens.

    ``origin_tokens`` is what this rank's own tree holds; ``max_tokens`` what the best placement over all ranks
    gives; ``max_rank`` the rank that supplies most of the difference (this rank when there is none).
    """

    origin_tokens: int
    max_tokens: int
    max_rank: int


class SourceKind(Enum):
    """Where pages lie, named as in SGLang's ``cached_tokens_details``."""

    OWN = "device"
    PEER = "peer"
    HOST = "host"
    STORE = "storage"
    REMOTE = "remote"


Supplier = SourceKind | str
"""A kind of source, or of the remote ones the node, by its address: each has a rate of its own."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring pages of a prompt at one kind of source. ``origin`` names the node of remote ones."""

    kind: SourceKind
    num_pages: int
    origin: str = ""

    @property
    def supplier(self) -> Supplier:
        return self.origin or self.kind


@dataclass(frozen=True, slots=True)
class Offer:
    """Where the leading pages of a request's tail can come from, and the rank that supplies most of them.

    ``runs`` follow each other from the front without a gap.
    """

    runs: tuple[Run, ...]
    rank: int

    @property
    def num_pages(self) -> int:
        return sum(run.num_pages for run in self.runs)

    def first(self, num_pages: int) -> Offer:
        """As much of it."""
        if num_pages >= self.num_pages:
            return self
        runs: list[Run] = []
        for run in self.runs:
            if num_pages > 0:
                runs.append(replace(run, num_pages=min(run.num_pages, num_pages)))
            num_pages -= run.num_pages
        return Offer(tuple(runs), self.rank)


MAX_RID_CHARS = 128
"""As much of a client's request id as is remembered of it."""


def request_id(rid: str, number: int) -> str:
    """A rank's own name of a request: the client's id, which may come again, with a number, which does not. All that a
    rank remembers of a request goes by it."""
    return f"{rid[:MAX_RID_CHARS]}#{number}"


def rid_of(request_id: str) -> str:
    """The client's id in a rank's own name of the request; as much of it as is remembered."""
    return request_id.rpartition("#")[0] or request_id


@dataclass(frozen=True, slots=True)
class Fetch:
    """What one request was granted: pages that stay where they are until they have been copied into its rank's pool."""

    request: str
    runs: tuple[Run, ...]
    page_tokens: int

    @property
    def tokens(self) -> Counter[SourceKind]:
        """How many tokens come from each kind of source."""
        tokens: Counter[SourceKind] = Counter()
        for run in self.runs:
            tokens[run.kind] += run.num_pages * self.page_tokens
        return tokens


LOAD_FAILED = "External KV cache load failed"
"""SGLang's words for pages that failed their checksum (``UnifiedRadixCache.finish_external_linker_loads``; a patch's
fingerprint covers them)."""


class Refusal(Enum):
    """Why what was promised could not be had."""

    LEASE = "a page had moved since the lookup"
    IN_FLIGHT_READ = "what was on its way did not come"
    WINDOW = "a window page, or the state, had gone"
    NAME = "another fetch of the same request was queued"
    SHARD = "another shard of the rank was refused"
    STOPPED = "the rank had stopped to share"
    FAULT = "a fault of Banyan's, in the log"


class Outcome(Enum):
    """What became of a request's fetch so far."""

    LEASED = "leased"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    LANDED = "landed"
    FAILED = "failed"


PORTS_OF_A_PAGE_SERVER = 2
"""The page server's own, and behind it the one that its bytes come from."""


_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^\s\[\]]{1,255})\]|(?P<name>[^\s\[\]:]{1,255})):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node's page servers are: a host, and the port of the first.

    Shard ``i`` of a rank holds another part of a token's KV than shard 0, so each has a page server of its own.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def of_shard(self, shard: int) -> Address:
        return Address(self.host, self.port + PORTS_OF_A_PAGE_SERVER * shard)

    @property
    def endpoint(self) -> str:
        """In the words of ZeroMQ."""
        return f"tcp://{self}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """HOST:PORT, an IPv6 host in brackets.

        Raises:
            ValueError: for anything else.
        """
        said = _ADDRESS.fullmatch(text)
        if said is None or not 0 < int(said["port"]) < 65535:
            raise ValueError(f"{text[:64]!r} is no HOST:PORT")
        return cls(said["ipv6"] or said["name"], int(said["port"]))
