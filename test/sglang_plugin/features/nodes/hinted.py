# SPDX-License-Identifier: Apache-2.0
"""A request to which a router has said something, as SGLang hands it to a rank."""

from __future__ import annotations

from collections.abc import Sequence

from test.sglang_plugin.rank.matched import Matched

from banyan.routing import hint
from banyan.routing.hint import ReadHint, SourceHint
from banyan.sglang_plugin.kv_hints import with_action

ACTIONS = {ReadHint: hint.READ_ACTION, SourceHint: hint.SOURCE_ACTION}


class Hinted(Matched):
    """As much of SGLang's request as is looked at."""

    extra_key = cache_salt = lora_id = None
    output_ids: tuple[int, ...] = ()

    def __init__(self, rid: str, prompt: Sequence[int], said: ReadHint | SourceHint | None) -> None:
        """``said``: None of a router that says nothing."""
        self.rid, self.origin_input_ids, self.kv_hints = rid, prompt, None
        if said is not None:
            self.kv_hints = with_action(None, ACTIONS[type(said)], {hint.TEXT: said.text()})
