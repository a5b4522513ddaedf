# SPDX-License-Identifier: Apache-2.0
"""A running server that is asked prompts, and to trace them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from banyan.cli.engine import Engine, EngineError

STREAM_END = b"[DONE]"


class TracingServer(Engine):
    """One server."""

    def stream(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Have a prompt answered, and tell of each piece of the answer when it comes.

        Raises:
            EngineError: when the server refuses or does not answer in time, also in the middle of an answer.
        """
        with self._answer("/generate", {**body, "stream": True}, headers) as response:
            for line in response:
                said = line.strip().removeprefix(b"data: ")
                if said and said != STREAM_END:
                    piece: dict[str, Any] = json.loads(said)
                    if "error" in piece:
                        raise EngineError(f"{self._url}/generate: {piece['error']}")
                    yield piece

    def set_trace_level(self, level: int) -> None:
        """From now on the server traces its requests in so much detail, where it was started with tracing; 0: none."""
        with self._answer(f"/set_trace_level?level={level}", None, {}):
            pass
