# SPDX-License-Identifier: Apache-2.0
"""Which server has a response that a client may go on from by its id alone (``previous_response_id``). Pure.

Invariants
  1. ``MAX_HELD`` responses are known, those that were made or gone on from last, each as a hash.
  2. What is not known is nobody's: such a request is placed as any other, and refused by a server in its own words.
  3. A tenant's responses are known to nobody else: ``owner`` is what tells tenants apart. Of too many, the oldest of
     who has most is forgotten: no tenant pushes out the others'.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict

from banyan.latest import Latest

MAX_HELD = 1 << 17
START_BYTES = 64 << 10
"""Of an answer, within which its id stands."""

_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,256})"')


class HeldResponses:
    """Those that went through one router."""

    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._max_held = max_held
        self._of_owners: defaultdict[str, Latest[bytes, str]] = defaultdict(lambda: Latest(max_held))

    def __len__(self) -> int:
        return sum(map(len, self._of_owners.values()))

    def made(self, answer: bytes, server: str, owner: str = "") -> None:
        """A server has begun to answer with these bytes."""
        found = _ID.search(answer[:START_BYTES])
        if found is not None:
            self._of_owners[owner].put(_digest(found[1]), server)
        while len(self) > self._max_held:
            max(self._of_owners.values(), key=len).popitem(last=False)

    def holder(self, response: str, owner: str = "") -> str | None:
        """The server that has it; None where that is not known."""
        own, digest = self._of_owners[owner], _digest(response.encode(errors="surrogatepass"))
        server = own.get(digest)
        if server is not None:
            own.put(digest, server)
        return server


def _digest(response: bytes) -> bytes:
    return hashlib.blake2b(response, digest_size=16).digest()
