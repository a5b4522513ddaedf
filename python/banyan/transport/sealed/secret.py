# SPDX-License-Identifier: Apache-2.0
"""The secret that the nodes of a cluster share, and the keys that are made of it."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import zmq
from zmq.utils import z85

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
