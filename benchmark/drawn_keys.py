# SPDX-License-Identifier: Apache-2.0
"""Headers of requests to a router that knows tenants, or to a server behind it: keys that are right, wrong, of two
tenants at once or no text, what tenants have in common, and words that only a router may say."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from pathlib import Path

from banyan.routing.headers import TENANT_HEADER
from banyan.routing.tenant_secret import TenantSecret
from benchmark.drawn_requests import Drawn

KEYS = {"acme": "a1", "umbrella": "u1"}
COMMON = "all"
WRONG = ("", "x", "a1 ", "a1\xff", "A1", "Bearer a1", "0" * 5000, "\x80\x81")
HEADERS = ("x-api-key", "api-key", "authorization")
FORGED = ("", "0" * 64, "\xe9" * 64, "g" * 63, "0" * 5000)


@dataclass(frozen=True)
class Keyed:
    """A request, and whether it shows a key of one tenant alone."""

    drawn: Drawn
    is_known: bool


def write_tenants(path: Path) -> Path:
    """The file of a router whose tenants have KEYS."""
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
    rows = (f'[{name}]\nkeys = ["sha256:{one}"]\ncommon = ["{COMMON}"]\n' for name, one in digests.items())
    path.write_text("".join(rows))
    path.chmod(0o600)
    return path


def words(secret: Path) -> tuple[str, ...]:
    """What a router with this secret says to a server of its tenants."""
    known = TenantSecret(secret.read_text().strip().encode())
    return tuple(known.word(known.salt_of("tenant", name)) for name in KEYS)


def keyed(rng: random.Random, drawn: Drawn) -> Keyed:
    """The same request with keys for a router."""
    headers = {name: value for name, value in drawn.headers.items() if name not in HEADERS}
    shown = {}
    for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 2))):
        key = rng.choice(tuple(KEYS.values())) if rng.random() < 0.8 else rng.choice(WRONG)
        name = rng.choice(HEADERS)
        shown[name] = f"{rng.choice(('Bearer', 'bearer'))} {key}" if name == "authorization" else key
    if rng.random() < 0.2:
        headers["x-banyan-common"] = rng.choice((COMMON, "none", "", "x" * 100))
    if rng.random() < 0.2:
        headers[TENANT_HEADER] = rng.choice(FORGED)
    return Keyed(replace(drawn, headers={**headers, **shown}), _is_known(shown))


def forged(rng: random.Random, drawn: Drawn, known: tuple[str, ...]) -> Keyed:
    """The same request past the router, straight to a server: with a word of its router, or with one that is none."""
    is_known = rng.random() < 0.5
    word = rng.choice(known if is_known else (*FORGED, known[0][:-1], known[0][::-1], known[0][:32] + known[1][32:]))
    return Keyed(replace(drawn, headers={**drawn.headers, TENANT_HEADER: word}), is_known)


def _is_known(shown: dict[str, str]) -> bool:
    keys = {value.partition(" ")[2] if name == "authorization" else value for name, value in shown.items()}
    return len({key.strip() for key in keys}) == 1 and {key.strip() for key in keys} <= set(KEYS.values())
