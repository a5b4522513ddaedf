# SPDX-License-Identifier: Apache-2.0
"""A running server that is given prompts, with what a request may ask of Banyan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from banyan.cli import engine
from banyan.planner import Action, asked
from banyan.routing import hint


def plan_hints(action: Action) -> dict[str, Any]:
    """The ``kv_hints`` of a request that asks for ``action``."""
    return _hints(asked.ACTION_TYPE, asked.payload(action))


def policy_hints(wish: Mapping[str, Any]) -> dict[str, Any]:
    """The ``kv_hints`` of a request with a wish for its dispatcher; ``hint.POLICY_ACTION`` says what it may hold."""
    return _hints(hint.POLICY_ACTION, wish)


def _hints(action_type: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's envelope around one action, as it goes into the body."""
    action = {
        "action_id": action_type,
        "action_type": action_type,
        "action_version": hint.ACTION_VERSION,
        "payload": dict(payload),
    }
    return {"protocol_version": "1", "message_id": action_type, "actions": [action]}


class Engine(engine.Engine):
    """One server."""

    def loads(self) -> list[dict[str, Any]]:
        """How busy its ranks are."""
        loads: list[dict[str, Any]] = self._call("/v1/loads?include=core")["loads"]
        return loads

    def prefill(self, token_ids: Sequence[int], *, rank: int, action: Action | None = None) -> dict[str, Any]:
        """Have a rank prefill a prompt and generate one token; the answer's ``meta_info``.

        ``action`` asks for what is to be done with what other ranks hold of the prompt.
        """
        meta: dict[str, Any] = self.generate(token_ids, rank=rank, action=action)["meta_info"]
        return meta

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        rank: int | None = None,
        num_tokens: int = 1,
        action: Action | None = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """Have ``num_tokens`` tokens generated greedily, past any end of text; the whole answer, once it is there.

        ``rank`` is the data-parallel rank that answers; without one the server chooses. ``action`` asks for what is to
        be done with what other ranks hold of the prompt; without one the planner decides. Under a ``cache_salt`` only
        what was computed under the same one counts as cached.

        Raises:
            EngineError: when the server refuses, or does not answer within ``TIMEOUT_S``.
        """
        body: dict[str, Any] = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True},
        }
        if rank is not None:
            body["routed_dp_rank"] = rank
        if action is not None:
            body["kv_hints"] = plan_hints(action)
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        answer: dict[str, Any] = self._call("/generate", body)
        return answer
