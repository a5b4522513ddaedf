# SPDX-License-Identifier: Apache-2.0
"""What stands for request ids and page keys in ``/server_info``, which may be read by more than those they belong to.

A page's key is an unsalted digest of tokens: whoever guesses a prompt could confirm the guess. An id lets anybody abort
the request. Pseudonyms are keyed digests under secrets of one start of a server: equal things have equal ones on all
its ranks, so prompts can still be laid over each other. That of an id can be computed by who knows the id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

RID_BYTES, KEY_BYTES = 8, 6


class Pseudonyms:
    """One server's. ``secret`` is what its processes alone know."""

    def __init__(self, secret: str) -> None:
        self._key_secret = _keyed(secret.encode(), "page keys", 32)
        self.nonce = _keyed(secret.encode(), "request ids", 16).hex()

    def of_key(self, key: str) -> str:
        return _keyed(self._key_secret, key, KEY_BYTES).hex()

    def told(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A rank's state without what belongs to somebody: with ``rid_nonce``, from which pseudonyms of ids follow."""
        return {
            **state,
            "rid_nonce": self.nonce,
            "plans": [{**plan, "rid": rid_pseudonym(self.nonce, plan["rid"])} for plan in state["plans"]],
            "prompts": [self._prompt(prompt) for prompt in state["prompts"]],
            "dropped": [{**leaf, "key": self.of_key(leaf["key"])} for leaf in state["dropped"]],
        }

    def _prompt(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        marks = [[num_tokens, self.of_key(key)] for num_tokens, key in prompt["marks"]]
        return {**prompt, "rid": rid_pseudonym(self.nonce, prompt["rid"]), "marks": marks}


def rid_pseudonym(nonce: str, rid: str) -> str:
    """What a server with this ``rid_nonce`` shows for a request."""
    return _keyed(bytes.fromhex(nonce), rid, RID_BYTES).hex()


def _keyed(secret: bytes, text: str, num_bytes: int) -> bytes:
    # An id is a client's: it may be any string, and one that is not Unicode is told as well.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=secret, digest_size=num_bytes).digest()
