# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of lines that change in every turn of a session. Scheduler thread only.

Its text belongs to a client: it is told only where the operator has asked for it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from banyan.sglang_plugin.prompt_refusals import END_OF_IDS
from banyan.telemetry import ChangingLines, Counters, Parting
from banyan.telemetry.changing_lines import MOST_SHOWN

MOST_LOOKED_BACK, MOST_MARKS = 4096, 32
"""Tokens, for the mark that begins a message, and marks among them: a prompt may be nothing but marks, and each is
decoded on the scheduler's thread."""

NEAR_LINE_TOKENS = 64
MOST_CHARACTERS = 200

_ROLE = re.compile(r"\b(system|developer|user|human|assistant|model|tool|observation)\b", re.IGNORECASE)
_TOOLS = re.compile(r"<tools?>|# Tools|\"type\": ?\"function\"|AVAILABLE_TOOLS", re.IGNORECASE)


class LineReport:
    """One rank's. ``tells_text``: whether the text of a line is told."""

    def __init__(self, counters: Counters, page_tokens: int, *, tells_text: bool) -> None:
        self._counters = counters
        self._page_tokens = page_tokens
        self._tells_text = tells_text
        self._lines = ChangingLines()
        self._shown: list[dict[str, Any]] = []

    def saw(self, req: Any) -> Parting | None:
        """A request of a session has come; of others nothing is known. What its answer may tell: the page, and not the
        token, for who guesses at another's prompt would know after each token whether it is right."""
        session = getattr(req, "banyan_session", None)
        if session is None:
            return None
        # What has another salt, or is for another adapter, is found by nobody else.
        name = "\0".join(str(getattr(req, field, None)) for field in ("cache_salt", "extra_key", "lora_id"))
        tokens = req.origin_input_ids
        tokens = tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)
        parting = self._lines.asked(f"{session}\0{name}", tokens)
        if parting is not None:
            self._counters.parted_prompts += 1
            if parting.is_line:
                self._counters.changing_line_prompts += 1
                self._show(parting, tokens, getattr(req, "banyan_tokenizer", None))
            parting = replace(parting, place=parting.place // self._page_tokens * self._page_tokens)
        return parting

    def state(self) -> dict[str, Any]:
        """The last of them, the latest last."""
        return {"changing_lines": self._shown}

    def _show(self, parting: Parting, tokens: Sequence[int], tokenizer: Any) -> None:
        place = parting.place
        self._shown = [one for one in self._shown if abs(one["place"] - place) > NEAR_LINE_TOKENS][-MOST_SHOWN + 1 :]
        self._shown.append(
            {
                "place": place,
                "num_prompts": parting.num_prompts,
                "num_tokens": len(tokens),
                "part": "" if tokenizer is None else part_of(tokenizer, tokens, place),
                "text": "" if tokenizer is None or not self._tells_text else line_at(tokenizer, tokens, place),
            }
        )


def part_of(tokenizer: Any, tokens: Sequence[int], place: int) -> str:
    """What of a chat a token belongs to: system, tools or messages; "" where the marks of the template do not say."""
    marks = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    back = range(min(place, len(tokens) - 1), max(-1, place - MOST_LOOKED_BACK), -1)
    for start in islice((start for start in back if tokens[start] in marks), MOST_MARKS):
        role = _ROLE.search(_text(tokenizer, tokens[start : start + 3]))
        if role is None:
            continue
        if role[1].lower() not in ("system", "developer"):
            return "messages"
        return "tools" if _TOOLS.search(_text(tokenizer, tokens[start:place])) else "system"
    return ""


def line_at(tokenizer: Any, tokens: Sequence[int], place: int) -> str:
    """The line around a token, as text."""
    before = _text(tokenizer, tokens[max(0, place - NEAR_LINE_TOKENS) : place])
    behind = _text(tokenizer, tokens[place : place + NEAR_LINE_TOKENS])
    return (before.rpartition("\n")[2] + behind.partition("\n")[0])[:MOST_CHARACTERS]


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Without what stands for images: tokenizers do not take such numbers."""
    return str(tokenizer.decode([token for token in tokens if 0 <= token < END_OF_IDS]))
