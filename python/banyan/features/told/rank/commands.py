# SPDX-License-Identifier: Apache-2.0
"""Where commands for the cache come to a rank, and where a session ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import DumperControlReqOutput

from banyan import faults
from banyan.features.told.command import METHOD, Command
from banyan.features.told.rank import told_rank
from banyan.routing.conversation import name_of
from banyan.sglang_plugin import runtime


def around_dumper_control(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """SGLang's command with a free body: one of Banyan's is answered here."""
    if recv_req.method != METHOD or runtime.config() is None:
        return original(scheduler, recv_req)
    scheduler.ipc_channels.send_to_tokenizer.send_output(_answer(recv_req.body, scheduler.tree_cache), recv_req)
    return None


def after_close_session(result: Any, scheduler: Any, recv_req: Any) -> None:
    """A session is over: what was kept for it is kept no longer."""
    rank = told_rank.installed()
    if rank is not None:
        rank.close(name_of(recv_req.session_id))


def _answer(body: Any, cache: Any) -> DumperControlReqOutput:
    rank = told_rank.installed()
    try:
        said = {} if rank is None or not runtime.is_sharing() else rank.obey(Command.of_passed_on(body), cache)
        return DumperControlReqOutput(success=True, response=[said])
    except ValueError as error:
        return DumperControlReqOutput(success=False, response=[], error=str(error))
    except BaseException as error:  # noqa: BLE001 - SGLang, asked in its place, would say that it has been done
        faults.note("told.answer", error)
        return DumperControlReqOutput(success=False, response=[], error="this rank has failed at it: its log says why")
