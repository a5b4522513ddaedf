# SPDX-License-Identifier: Apache-2.0
"""Hash traces as Mooncake publishes them: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

A hash id names a block of 512 tokens together with all that comes before it. The trace names no sessions: a request
that contains all full blocks of an earlier one is taken for its next turn.
"""

from __future__ import annotations

from pathlib import Path

from banyan_lab.replay.lines import json_lines, naming
from banyan_lab.replay.trace import Trace, TraceRequest, runs_of

BLOCK_TOKENS = 512


def load(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceError: for a line without these fields.
    """
    follower = _Conversations()
    requests = []
    for number, line in json_lines(path):
        with naming(path, number, "not a hash trace"):
            ids = [int(block) for block in line["hash_ids"]]
            at_s, num_input_tokens = float(line["timestamp"]) / 1e3, int(line["input_length"])
            num_output_tokens = int(line["output_length"])
            session, turn = follower.place(ids, num_input_tokens // BLOCK_TOKENS)
            requests.append(TraceRequest(session, turn, at_s, num_input_tokens, num_output_tokens, runs_of(ids)))
    requests.sort(key=lambda request: request.at_s)
    return Trace(path.name.partition(".")[0], BLOCK_TOKENS, tuple(requests))


class _Conversations:
    """Finds the conversation that a prompt continues.

    Each conversation waits at the last full block of its latest prompt. That block is given up when a prompt goes on
    from there, so a prompt that many share (a system prompt of some blocks) gathers them into no conversation.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[str, int]] = {}
        self._num_sessions = 0

    def place(self, ids: list[int], num_full: int) -> tuple[str, int]:
        """Session and turn of the next prompt; only its first ``num_full`` blocks are whole."""
        full = ids[:num_full]
        session, turn = next((self._waiting.pop(block) for block in reversed(full) if block in self._waiting), ("", 0))
        if not session:
            session = f"s{self._num_sessions}"
            self._num_sessions += 1
        if full:
            self._waiting[full[-1]] = session, turn + 1
        return session, turn
