# SPDX-License-Identifier: Apache-2.0
"""Commands for the cache on their way to all ranks, in the process that a client reaches.

They take the way of SGLang's own command with a free body, and every rank answers. A pin that one rank refuses is
released at the others.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt.managers.io_struct import DumperControlReqInput

from banyan.features.told.command import METHOD, Action, Command
from banyan.features.told.table import Refused
from banyan.sglang_plugin import prompt_refusals


def check(command: Command, manager: Any) -> None:
    """Whether a prompt of the served model could be meant.

    Raises:
        ValueError: naming the field.
    """
    if command.input_ids:
        prompt_refusals.check_ids(command.input_ids, manager.model_config.vocab_size)
    if len(command.input_ids) > manager.context_len:
        raise ValueError(f"input_ids: {len(command.input_ids)} tokens, the model takes {manager.context_len} at most")


async def tell(manager: Any, command: Command) -> dict[str, Any]:
    """Tell all ranks. What the first of them answers.

    Raises:
        Refused: with the line of a rank that refuses.
    """
    answers = await _ask(manager, command)
    refusals = [answer.error for answer in answers if not answer.success]
    if not refusals:
        said: dict[str, Any] = answers[0].response[0]
        return said
    if len(refusals) < len(answers) and command.action is Action.PIN:
        await _ask(manager, msgspec.structs.replace(command, action=Action.RELEASE))
    raise Refused(refusals[0])


async def _ask(manager: Any, command: Command) -> list[Any]:
    manager.auto_create_handle_loop()
    answers: list[Any] = await manager.dumper_control(DumperControlReqInput(method=METHOD, body=command.body()))
    return answers
