# SPDX-License-Identifier: Apache-2.0
"""Whose a request is: the salt of a tenant's pages, and how a router says it so that a server believes it. Pure.

A router knows tenants by their keys (``banyan.router.tenants``), servers know none of them. Both know a secret. What
the router says in a header is marked with a digest that only they can make, so a client's own word counts for nothing.

Invariants
  1. A tenant's salts are its own 32 characters and, behind them, what its client says. So no client, whatever it says,
     has a salt of another tenant's.
  2. A salt is not salted again.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

SALT_CHARS = 32
_WORD_CHARS = 2 * SALT_CHARS
_PROTOCOL = "banyan tenants 1"


@dataclass(frozen=True, slots=True)
class TenantSecret:
    """What routers and servers with one secret say to each other."""

    secret: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """By which others with the same secret know it; tells nothing of the secret."""
        return self._digest("name", "")

    def salt_of(self, kind: str, name: str) -> str:
        """The salt of what has this name, among its kind."""
        return self._digest(f"salt of {kind}", name)

    def word(self, salt: str) -> str:
        """The header with which a router names the salt of a request."""
        return salt + self._digest("word", salt)

    def heard(self, word: str) -> str | None:
        """The salt that a header names; None when no router with this secret has said so."""
        if len(word) != _WORD_CHARS or not word.isascii():
            return None
        salt = word[:SALT_CHARS]
        return salt if hmac.compare_digest(self.word(salt), word) else None

    @property
    def routers_word(self) -> str:
        """The header with which a router says that it asks for itself, and for no client of it."""
        return self.word(self.salt_of("router", ""))

    def is_routers(self, word: str) -> bool:
        """Whether a router has said so."""
        return self.heard(word) == self.salt_of("router", "")

    def _digest(self, what: str, text: str) -> str:
        said = f"{_PROTOCOL} {what}\0{text}".encode(errors="surrogatepass")
        return hmac.new(self.secret, said, hashlib.sha256).hexdigest()[:SALT_CHARS]


def salted(salt: str, own: str | None) -> str:
    """The salt of a request of the tenant with ``salt``, whose client has said ``own``."""
    own = own or ""
    return own if own.startswith(salt) else salt + own


def tenants_part(cache_salt: str, secret_file: str) -> str:
    """Of a salt, what no client can choose: the tenant's where the server has a ``secret_file``; else all of it."""
    return cache_salt[:SALT_CHARS] if secret_file else cache_salt
