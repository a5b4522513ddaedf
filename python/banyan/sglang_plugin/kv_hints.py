# SPDX-License-Identifier: Apache-2.0
"""Banyan's actions in SGLang's ``kv_hints``, the envelope in which a request carries what it wants of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope

from banyan.routing import hint
from banyan.sglang_plugin import runtime

MARK = "server"
"""Of an action that only this server says: its id, which no client knows."""


def with_action(hints: KvHintsEnvelope | None, action_type: str, payload: Mapping[str, Any]) -> KvHintsEnvelope:
    """``hints`` with one action in front: the first of its type counts. It is called after its type, and so is a new
    envelope. One that only this server says is marked as its own."""
    mark = {MARK: runtime.server_id()} if action_type in hint.OWN_ACTIONS else {}
    action = KvHintAction(
        action_id=action_type,
        action_type=action_type,
        action_version=hint.ACTION_VERSION,
        payload={**payload, **mark},
    )
    if hints is None:
        return KvHintsEnvelope(protocol_version="1", message_id=action_type, actions=[action])
    return KvHintsEnvelope(
        protocol_version=hints.protocol_version, message_id=hints.message_id, actions=[action, *hints.actions]
    )


def payload_of(hints: KvHintsEnvelope | None, action_type: str) -> Mapping[str, Any] | None:
    """What the first action of this type, in the version that this server speaks, carries; None when there is none. Of
    a type that only this server says, others do not count."""
    for action in hints.actions if hints is not None else ():
        if action.action_type == action_type and action.action_version == hint.ACTION_VERSION and _is_meant(action):
            return {name: value for name, value in action.payload.items() if name != MARK}
    return None


def session_of(req: Any) -> str | None:
    """What names the conversation: SGLang's session, else the routing key (header ``x-smg-routing-key``), else what its
    client says by the way (``routing.conversation``)."""
    if req.session_id is not None:
        return str(req.session_id)
    if req.session_params is not None and req.session_params.id is not None:
        return str(req.session_params.id)
    if req.routing_key is not None:
        return str(req.routing_key)
    said = payload_of(req.kv_hints, hint.SESSION_ACTION)
    return str(said["name"]) if said is not None else None


def _is_meant(action: KvHintAction) -> bool:
    return action.action_type not in hint.OWN_ACTIONS or action.payload.get(MARK) == runtime.server_id()
