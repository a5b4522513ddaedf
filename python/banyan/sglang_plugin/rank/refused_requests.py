# SPDX-License-Identifier: Apache-2.0
"""A request that SGLang cannot make of what its client has sent is answered with 400, and one that comes while the
memory is given away with 503. In SGLang what is raised there ends all ranks.

Invariants
  1. The request has not been queued: nothing computes it. SGLang queues it last.
  2. What may be the machine's fault, and not the client's (memory, drives, devices), is raised as in SGLang.
  3. What came by gRPC has passed by the checks of the main process (``banyan.sglang_plugin.launcher.clients``), for its
     servicer speaks to the ranks: it is checked here.
  4. The shards of a rank get the same bytes and come to the same answer; the one that speaks to clients tells it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.runtime_context import get_serving

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.prompt_refusals import check_tokenized
from banyan.sglang_plugin.rank import memory_commands

logger = logging.getLogger("banyan")

OF_A_WRONG_VALUE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
    RecursionError,  # of a session with a thousand turns
)


def around_handle_request(original: Callable[..., None], scheduler: Any, asked: Any, *args: Any, **named: Any) -> None:
    """Of a generation request, or one of an embedding or reward model."""
    if runtime.config() is None:
        original(scheduler, asked, *args, **named)
        return
    if memory_commands.is_out(scheduler):
        _refuse(scheduler, asked, memory_commands.OUT, HTTPStatus.SERVICE_UNAVAILABLE)
        return
    try:
        _check_turn(scheduler, asked)
        if get_serving().smg_grpc_mode:
            check_tokenized(asked, scheduler.model_config.vocab_size)
        original(scheduler, asked, *args, **named)
    except OF_A_WRONG_VALUE as error:
        message = f"SGLang makes no request of this: {type(error).__name__}: {error}"
        # Both hold a client's text, of any length and with any line ends.
        logger.warning("banyan: request %.128r is refused: %.1024r", asked.rid, message)
        _refuse(scheduler, asked, message, HTTPStatus.BAD_REQUEST)


def _check_turn(scheduler: Any, asked: Any) -> None:
    """SGLang clears the turns of a session while it goes through them, and ends at the second step.

    Raises:
        ValueError: for one that replaces all of them.
    """
    turn = getattr(asked, "session_params", None)
    if turn is None or not getattr(turn, "replace", False) or getattr(turn, "rid", None) is not None:
        return
    session = scheduler.session_controller.get(turn.id)
    if session is not None and session.req_nodes:
        raise ValueError("session_params: replace needs the rid of the turn that is replaced")


def _refuse(scheduler: Any, asked: Any, message: str, status: HTTPStatus) -> None:
    reason = {"type": "abort", "status_code": status, "message": message}
    _tell(scheduler, AbortReq(rid=asked.rid, abort_message=message, finished_reason=reason), asked)


def _tell(scheduler: Any, answer: AbortReq, asked: Any) -> None:
    if get_serving().smg_grpc_mode:
        # The servicer hears refusals where it hears tokens, and drops them where SGLang's main process hears them.
        scheduler.ipc_channels.send_to_detokenizer.send_output(answer, asked)
    else:
        scheduler.send_abort_output(answer, asked)
