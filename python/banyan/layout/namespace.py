# SPDX-License-Identifier: Apache-2.0
"""The namespace digest: everything that must agree before two KV pages may be exchanged.

A page key says which tokens a page holds, not for which model, type or shard. The namespace says the rest. Different
namespaces never share and are never an error: a rank simply does not see the other's pages.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

FORMAT_VERSION = 4
"""Raise it whenever bytes of a page, or its key, change their meaning: what was stored before is then not found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The identity of KV content. Every field is part of the digest.

    ``weights_epoch`` is 0 while the weights are those that were loaded at the start, and 1 from their first change on.
    ``server`` is then the digest of what the weights are; where nobody has looked, this server's name and what the
    weights of the rank have gone through: two ranks share as soon as that is the same. Before it is empty: servers
    share what they loaded from equal files.

    ``engine`` is the engine's name and version, and the digest of its models' code where pages outlive the server or
    leave it: another one may compute other KV of the same tokens.

    ``draft`` says whose KV lies behind the model's in each page; empty where no draft's does. ``window`` says which
    layers' KV a page has, or whose states, of a model that keeps sliding windows or states apart; empty where a page
    has that of all layers.

    The last four say which part of a token's KV the process holds: its shard's heads, by attention TP, and its shard's
    tokens, by CP. Where KV is replicated over attention TP they are 1 and 0 on all shards.
    """

    model: str
    revision: str
    weight_version: str
    weights_sha256: str
    weights_epoch: int
    server: str
    engine: str
    model_config_sha256: str
    kv_dtype: str
    page_tokens: int
    first_layer: int
    num_layers: int
    page: tuple[tuple[tuple[str, int], ...], ...]
    pool_layout: str
    attn_tp_size: int
    attn_tp_rank: int
    attn_cp_size: int
    attn_cp_rank: int
    draft: tuple[str, ...] = ()
    window: tuple[str, ...] = ()

    def digest(self) -> bytes:
        """32 bytes; equal exactly when all fields and the format version are equal."""
        fields = {"format": FORMAT_VERSION, **asdict(self)}
        for name in ("draft", "window"):
            if not fields[name]:
                # As before there were any: stores of servers without one stay what they are.
                del fields[name]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"banyan-namespace\0" + text.encode()).digest()
