# SPDX-License-Identifier: Apache-2.0
"""Banyan's actions in SGLang's ``kv_hints``, the envelope in which a request carries what it wants of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope

from banyan.routing import hint
from banyan.sglang_plugin import runtime


def with_action(
    hints: KvHintsEnvelope | None, *, action_id: str, action_type: str, action_version: str, payload: Mapping[str, Any]
) -> KvHintsEnvelope:
    """``hints`` with one action in front: the first of its type counts. A new envelope is called after the action."""
    action = KvHintAction(
        action_id=action_id, action_type=action_type, action_version=action_version, payload=dict(payload)
    )
    if hints is None:
        return KvHintsEnvelope(protocol_version="1", message_id=action_id, actions=[action])
    return KvHintsEnvelope(
        protocol_version=hints.protocol_version, message_id=hints.message_id, actions=[action, *hints.actions]
    )


def payload_of(hints: KvHintsEnvelope | None, action_type: str, action_version: str) -> Mapping[str, Any] | None:
    """What the first action of this type and version carries; None when there is none."""
    for action in hints.actions if hints is not None else ():
        if action.action_type == action_type and action.action_version == action_version:
            payload: Mapping[str, Any] = action.payload
            return payload
    return None


def is_detour(hints: KvHintsEnvelope | None) -> bool:
    """Whether a request is a prefill that the dispatcher sent for another rank's request.

    A client that says so does not know the server's id.
    """
    payload = payload_of(hints, hint.DETOUR_ACTION, hint.ACTION_VERSION)
    return payload is not None and payload.get("server") == runtime.server_id()
