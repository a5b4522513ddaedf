# SPDX-License-Identifier: Apache-2.0
"""A running SGLang server as the commands see it: a few calls over HTTP, without the engine's packages."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from banyan.decoding import json_of, printable
from banyan.routing.cache_path import CACHE_PATH

TIMEOUT_S = 600.0

MOST_ANSWER_BYTES = 1 << 28
"""A server of a thousand ranks tells less of itself. What answers at an address may be anything."""

SAID_BYTES = 300
"""Of a refusal that are shown."""


class EngineError(RuntimeError):
    """The server cannot be asked, or does not have what was asked for; the message says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Engine:
    """One server. Calls block, one at a time. ``api_key``: the server's, where it has one."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s

    def server_info(self) -> dict[str, Any]:
        """What the server tells about itself and its ranks."""
        return self._call("/server_info")

    def ranks(self) -> dict[int, dict[str, Any]]:
        """Banyan's state of each data-parallel rank.

        Raises:
            EngineError: when the server does not share.
        """
        states = self.server_info().get("internal_states", [])
        found = {state["banyan"]["dp_rank"]: state["banyan"] for state in states if "banyan" in state}
        if not found:
            raise EngineError(f"{self._url} runs without sharing: start it with --enable-banyan")
        return found

    def tell_cache(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Tell its cache what to do with a prompt; what became of it.

        Raises:
            EngineError: when it refuses.
        """
        return self._call(CACHE_PATH, command)

    def tokens(self, question: Mapping[str, Any]) -> list[int]:
        """Those that the server makes of a prompt, a chat, or a request that a router may ask about."""
        tokens: list[int] = self._call("/tokenize", question)["tokens"]
        return tokens

    def served_model(self) -> str:
        """The name under which it serves its model."""
        return str(self._call("/model_info").get("served_model_name"))

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with self._answer(path, body, {}) as response:
            said = response.read(MOST_ANSWER_BYTES + 1)
            if len(said) > MOST_ANSWER_BYTES:
                raise ValueError(f"more than {MOST_ANSWER_BYTES} bytes came")
            answer = json_of(said)
            if not isinstance(answer, dict):
                raise ValueError("what answers is no object")
            return answer

    @contextlib.contextmanager
    def _answer(self, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Iterator[Any]:
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **self._headers, **headers}
        try:
            request = urllib.request.Request(self._url + path, data, sent)
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            said = _read(error)
            raise EngineError(f"{self._url}{path}: HTTP {error.code}: {said}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EngineError(f"{self._url}{path}: {error}: is the server running, and is this its address?") from error


def _read(error: urllib.error.HTTPError) -> str:
    """What an answer says, as far as it comes."""
    try:
        return error.read(SAID_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as cut:
        return repr(cut)
