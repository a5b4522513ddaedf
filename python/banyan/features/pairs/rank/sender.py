# SPDX-License-Identifier: Apache-2.0
"""A prefill server's sender of one request: whoever waits for what it will not send is told (``hand_over``)."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll


class TellingSender:
    """In front of SGLang's: an abort reaches the other side."""

    kv_mgr: Any
    bootstrap_room: int
    conclude_state: Any

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *more: Any, **named: Any) -> None:
        # One before it in this room may have ended behind its hand-over: as if given up before it was asked for.
        mgr.take_given_up(bootstrap_room)
        # Before SGLang opens the room, and says where it is: else others that ask meanwhile make it be forgotten.
        mgr.rooms.claim(bootstrap_room)
        try:
            super().__init__(mgr, bootstrap_addr, bootstrap_room, *more, **named)  # type: ignore[call-arg]
        except BaseException:
            mgr.rooms.release(bootstrap_room)
            raise

    def clear(self) -> None:
        with self.kv_mgr.unheeded():
            super().clear()  # type: ignore[misc]
        self.kv_mgr.over(self.bootstrap_room)

    def abort(self) -> None:
        has_sent = KVPoll.Success in (self.conclude_state, self.kv_mgr.request_status.get(self.bootstrap_room))
        super().abort()  # type: ignore[misc]
        self.kv_mgr.over(self.bootstrap_room)
        if not has_sent:
            self.kv_mgr.give_up(self.bootstrap_room)

    def failure_exception(self) -> None:
        """SGLang takes here why the request has failed, and raises it. Where the room was not asked for in full, as
        after SGLang's time-out, nobody has heard of that."""
        if not self.kv_mgr.is_asked_for(self.bootstrap_room):
            self.kv_mgr.give_up(self.bootstrap_room)
        super().failure_exception()  # type: ignore[misc]


def after_add(result: None, queue: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """A request has come. One that is refused at once, as with a prompt above this server's capacity, has no sender."""
    give_up = getattr(queue.kv_manager, "give_up", None)
    if give_up is not None and req.disagg_kv_sender is None and req.bootstrap_room is not None:
        give_up(req.bootstrap_room)
