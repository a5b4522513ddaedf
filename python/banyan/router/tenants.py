# SPDX-License-Identifier: Apache-2.0
"""Tenants by key: whose a request is, by the key that its client shows.

The file of keys is TOML, a table for each tenant; it holds digests, so whoever reads it has no key. Keys are looked up
by their digest too: how long that takes tells nothing of any other key.

Invariants
  1. A request whose key is nobody's, or whose keys are of several tenants, is refused before its body is read.
  2. A key that a tenant shows goes to no server.
  3. A file that cannot be read, or is wrong in any part, changes nothing: the tenants stay those of the last good one.
  4. The file has at most ``MOST_TENANTS`` tenants, with ``MOST_KEYS`` keys together.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan.owner import read_private
from banyan.router.bodies import Refused
from banyan.router.call import KnownTenant
from banyan.routing.headers import TENANT_HEADER, TENANT_NAME_HEADER
from banyan.routing.tenant_secret import TenantSecret

MOST_TENANTS = 1024
MOST_KEYS = 1 << 16
MOST_FILE_BYTES = 8 << 20
KEY_HEADERS = ("authorization", "x-api-key", "api-key")
"""Where clients show a key: OpenAI's, Anthropic's, Azure's."""

COMMON_HEADER = "x-banyan-common"
"""Names whose pages a request shares, instead of its tenant's own."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_OF_NOTHING = f"sha256:{hashlib.sha256().hexdigest()}"


@dataclass(frozen=True, slots=True)
class Tenant:
    """``common``: names under which it may share pages with others, on request."""

    name: str
    common: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Keys:
    """What a file says: the tenants, by digests of their keys."""

    by_digest: Mapping[str, Tenant]

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Raises:
        OSError, ValueError: when the file cannot be read, others may read it, or it is wrong; the line says where.
        """
        return cls.parse(read_private(path, MOST_FILE_BYTES).decode())

    @classmethod
    def parse(cls, text: str) -> Keys:
        """Raises:
        ValueError: naming the first thing that is wrong.
        """
        try:
            said = tomllib.loads(text)
        except RecursionError:
            raise ValueError("lists within lists, too deep to be read") from None
        if not said:
            raise ValueError("no tenant: write [NAME] and keys = [...]")
        if len(said) > MOST_TENANTS:
            raise ValueError(f"{len(said)} tenants, {MOST_TENANTS} at most")
        by_digest: dict[str, Tenant] = {}
        for name, fields in said.items():
            tenant, digests = _tenant(name, fields)
            for digest in digests:
                if digest in by_digest:
                    raise ValueError(f"[{name}] keys: a key of {by_digest[digest].name} as well")
                by_digest[digest] = tenant
        if len(by_digest) > MOST_KEYS:
            raise ValueError(f"{len(by_digest)} keys, {MOST_KEYS} at most")
        return cls(by_digest)

    def tenant(self, key: str) -> Tenant | None:
        """Whose key it is; a key as headers have it, which stand for bytes."""
        return self.by_digest.get(hashlib.sha256(_bytes(key)).hexdigest())

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tenant.name for tenant in self.by_digest.values())


def _tenant(name: str, fields: Any) -> tuple[Tenant, list[str]]:
    if not _NAME.fullmatch(name):
        raise ValueError(f"[{name[:64]}]: a name has letters, digits and _.-, 64 at most")
    if not isinstance(fields, dict) or (unknown := sorted(fields.keys() - {"keys", "common"})):
        what = f"{unknown[0]}: not known" if isinstance(fields, dict) else "no table"
        raise ValueError(f"[{name}] {what}; a tenant has keys and common")
    keys, common = fields.get("keys"), fields.get("common", [])
    if not isinstance(keys, list) or not keys:
        raise ValueError(f"[{name}] keys: a list of at least one")
    for key in keys:
        # Not shown: it may be a key by mistake.
        if not isinstance(key, str) or not _DIGEST.fullmatch(key):
            raise ValueError(f"[{name}] keys: a digest each, as sha256:HEX; make one with `printf %s KEY | sha256sum`")
        if key == _OF_NOTHING:
            raise ValueError(f"[{name}] keys: the digest of an empty key, which everybody has")
    if not isinstance(common, list) or not all(isinstance(one, str) and _NAME.fullmatch(one) for one in common):
        raise ValueError(f"[{name}] common: a list of names")
    return Tenant(name, frozenset(common)), [key.removeprefix("sha256:") for key in keys]


class Tenants:
    """Those of one router. ``server_key``: what servers are shown in place of a tenant's key; None for nothing."""

    def __init__(self, path: Path, secret: bytes, server_key: str | None) -> None:
        """Raises OSError and ValueError as ``Keys.read``."""
        self.secret = TenantSecret(secret)
        self.keys = Keys.read(path)
        self.why_stale: str | None = None
        self._path = path
        self._server_key = server_key
        self._seen = self._state()
        self._is_asked_to_read = False

    def read_again(self) -> None:
        """At the next ``refresh``, whether the file has changed or not. May be called by a handler of signals."""
        self._is_asked_to_read = True

    def refresh(self) -> bool:
        """Read the file if it has changed, or was wrong when it was last read; whether there are new keys."""
        seen = self._state()
        if seen == self._seen and self.why_stale is None and not self._is_asked_to_read:
            return False
        self._is_asked_to_read = False
        try:
            self.keys = Keys.read(self._path)
        except (OSError, ValueError) as error:
            self.why_stale = str(error)
            return False
        self._seen, self.why_stale = seen, None
        return True

    def _state(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def known_by(self, headers: Mapping[str, str]) -> KnownTenant:
        """The tenant of a request with these headers.

        Raises:
            Refused: 401 or 403, before anything of the request is used.
        """
        found = {self.keys.tenant(key) for key in _shown(headers)}
        tenant = found.pop() if len(found) == 1 else None
        if tenant is None:
            raise Refused("no tenant has this key: show one as authorization: Bearer KEY, or x-api-key", "no_key", 401)
        common = headers.get(COMMON_HEADER)
        if common is not None and common not in tenant.common:
            raise Refused(f"{COMMON_HEADER}: your tenant shares nothing under this name", "forbidden", 403)
        salt = self.secret.salt_of("tenant", tenant.name) if common is None else self.secret.salt_of("common", common)
        says = {TENANT_HEADER: self.secret.word(salt), TENANT_NAME_HEADER: tenant.name}
        return KnownTenant(tenant.name, salt, says)

    def onward(self, headers: Mapping[str, str]) -> dict[str, str]:
        """What a server gets of a client's headers."""
        kept = {name: value for name, value in headers.items() if name.lower() not in KEY_HEADERS}
        return kept if self._server_key is None else {**kept, "authorization": f"Bearer {self._server_key}"}

    def is_operator(self, headers: Mapping[str, str]) -> bool:
        """Whether the servers' own key is shown."""
        key, shown = self._server_key, _shown(headers)
        return bool(key) and len(shown) == 1 and hmac.compare_digest(_bytes(shown[0]), str(key).encode())


def _bytes(key: str) -> bytes:
    """What a client has sent: Starlette reads headers as Latin-1, and what is not cannot have come in one."""
    return key.encode("latin-1", errors="replace")


def _shown(headers: Mapping[str, str]) -> list[str]:
    shown = [(name, headers[name].strip()) for name in KEY_HEADERS if name in headers]
    return [_bearer(value) if name == "authorization" else value for name, value in shown]


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
