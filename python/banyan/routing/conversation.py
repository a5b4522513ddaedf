# SPDX-License-Identifier: Apache-2.0
"""What names a conversation in requests whose clients do not speak of sessions: pure.

A name is only ever a hash of what a client said, and of one length: whoever keeps names keeps no user's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

SESSION_HEADERS = (
    "x-session-id",
    "session-id",
    "session_id",
    "x-claude-code-session-id",
    "conversation_id",
    "x-conversation-id",
    "x-session-affinity",
)
"""Headers that clients name their conversation with; the first that is there counts."""

NAME_BYTES = 16


def conversation_of(fields: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The name of a request's conversation, from what it says by the way; None when it says nothing.

    In this order: a header, OpenAI's ``prompt_cache_key`` and ``conversation``, and ``metadata``, whose ``user_id`` is
    last, for it may name a user of many conversations.
    """
    conversation, metadata = fields.get("conversation"), fields.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    said = (
        *(headers.get(name) for name in SESSION_HEADERS),
        fields.get("prompt_cache_key"),
        conversation.get("id") if isinstance(conversation, Mapping) else conversation,
        metadata.get("session_id"),
        metadata.get("user_id"),
    )
    name = next((one for one in said if isinstance(one, str) and one), None)
    return None if name is None else name_of(name)


def name_of(said: str) -> str:
    """How a conversation, or a session, is called here: a hash, so that nobody keeps a client's words."""
    return hashlib.blake2b(said.encode(errors="surrogatepass"), digest_size=NAME_BYTES).hexdigest()
