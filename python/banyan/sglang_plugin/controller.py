# SPDX-License-Identifier: Apache-2.0
"""The dispatcher's side: look every prompt up in the directory, and wait for messages instead of spinning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import zmq
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from banyan import _native
from banyan.routing import hint
from banyan.routing.hint import PrefixHint
from banyan.sglang_plugin import runtime, seams

logger = logging.getLogger("banyan")

POLL_MS = 200
"""How long the loop may sleep without a message; the watchdog wants to be fed more often than that by far."""

MAX_DRAIN = 64
"""Messages handled between two looks at the watchdog."""


def after_init_dispatcher(result: None, controller: Any) -> None:
    """Put the lookup in front of whichever dispatch policy SGLang has chosen."""
    seams.verify("controller")
    config = runtime.config()
    if config is None or not config.shares or not config.prefix_hints:
        return
    carried = runtime.bookkeeping(controller.server_args)
    assert carried is not None
    scout = PrefixScout(
        _native.Roster.open(carried["roster"]),
        tp_size=controller.server_args.tp_size,
        page_tokens=controller.server_args.page_size,
    )
    dispatch = controller.dispatching

    def dispatch_with_hint(req: Any) -> None:
        if isinstance(req, TokenizedGenerateReqInput):
            scout.annotate(req)
        dispatch(req)

    controller.dispatching = dispatch_with_hint


class PrefixScout:
    """Tells, for a prompt, how long a prefix each rank holds. It reads the directory and leases nothing."""

    def __init__(self, roster: _native.Roster, *, tp_size: int, page_tokens: int) -> None:
        self._roster = roster
        self._tp_size = tp_size
        self._page_tokens = page_tokens
        self._peers: _native.Peers | None = None

    def annotate(self, req: TokenizedGenerateReqInput) -> None:
        """Add the prefix hint to the request's ``kv_hints``."""
        seen = self.look_up(req)
        if seen is None:
            return
        action = KvHintAction(
            action_id=f"banyan-{req.rid}",
            action_type=hint.ACTION_TYPE,
            action_version=hint.ACTION_VERSION,
            payload=seen.payload(),
        )
        old = req.kv_hints
        if old is None:
            req.kv_hints = KvHintsEnvelope(protocol_version="1", message_id=str(req.rid), actions=[action])
        else:
            req.kv_hints = KvHintsEnvelope(
                protocol_version=old.protocol_version,
                message_id=old.message_id,
                actions=[*old.actions, action],
            )

    def look_up(self, req: TokenizedGenerateReqInput) -> PrefixHint | None:
        """The longest prefix over all ranks; None for prompts without tokens or before the ranks have met."""
        peers = self._meet()
        num_pages = (len(req.input_ids) - 1) // self._page_tokens if req.input_ids is not None else 0
        if peers is None or num_pages < 1:
            return None
        # Prompts of a LoRA adapter hash under its id, as the rank's own request does.
        extra_key = (req.extra_key or "") + req.lora_id if req.lora_id is not None else req.extra_key
        key = RadixKey(req.input_ids[: num_pages * self._page_tokens], extra_key=extra_key, cache_salt=req.cache_salt)
        keys = get_storage_hash_str(key, page_size=self._page_tokens)
        return PrefixHint.from_pages_by_rank(peers.prefix_lens(keys)[:: self._tp_size], self._page_tokens)

    def _meet(self) -> _native.Peers | None:
        if self._peers is None:
            ranks = [member for member in self._roster.members() if member["alive"]]
            if not ranks:
                return None
            namespace = bytes.fromhex(ranks[0]["namespace"])
            self._peers = _native.Peers(self._roster, None, 0, namespace, [], None)
        return self._peers


def around_event_loop(original: Callable[[Any], None], controller: Any) -> None:
    """The controller's loop with a poller in front: the upstream one tests an empty socket a million times a second."""
    if runtime.config() is None:
        original(controller)
        return
    # Imported late: the name is the one the upstream loop uses, and tests of this module do without it.
    from sglang.srt.managers.io_struct import sock_recv

    poller = zmq.Poller()
    poller.register(controller.recv_from_tokenizer, zmq.POLLIN)
    while True:
        controller.soft_watchdog.feed()
        if not poller.poll(POLL_MS):
            continue
        for _ in range(MAX_DRAIN):
            try:
                message = sock_recv(controller.recv_from_tokenizer, flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != zmq.EAGAIN:
                    raise
                break
            controller._request_dispatcher(message)
