# SPDX-License-Identifier: Apache-2.0
"""The secret that the nodes of a cluster share, and the keys that are made of it."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

LEAST_SECRET_BYTES = 16
PROTOCOL = 1
"""Of the nodes. Those of different protocols cannot shake hands: their keys differ."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, in the form that ZeroMQ takes."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class Keys:
    """The pair of every page server, and the pair of everybody who may borrow."""

    page_server: KeyPair
    borrower: KeyPair

    @classmethod
    def of(cls, secret: bytes) -> Keys:
        return cls(_pair(secret, "page_server"), _pair(secret, "borrower"))


def _pair(secret: bytes, role: str) -> KeyPair:
    digest = hmac.new(secret, f"banyan nodes {PROTOCOL} {role}".encode(), hashlib.sha256).digest()
    private = z85.encode(digest)
    return KeyPair(zmq.curve_public(private), private)


def read_secret(path: Path) -> bytes:
    """The content of a secret file.

    Raises:
        OSError: when it cannot be read.
        ValueError: when others may read it, it belongs to somebody else, or it is too short to be a secret.
    """
    # Opened first, so that what is judged is what is read.
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        secret = file.read().strip()
    if status.st_uid != os.geteuid():
        raise ValueError("it belongs to another user")
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise ValueError(f"others may open it (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600")
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(f"{len(secret)} bytes are no secret: use at least {LEAST_SECRET_BYTES} (openssl rand -hex 32)")
    return secret
