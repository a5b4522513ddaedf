# SPDX-License-Identifier: Apache-2.0
"""Conversations that come back again and again, and what became of each request."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from banyan.planner import Action
from benchmark.engine import plan_hints

NUM_PROMPTS = 24
PROMPT_TOKENS = 640
PAGE_TOKENS = 16
TIMEOUT_S = 150.0
MOVE = plan_hints(Action.MOVE)
"""What is found is moved, whatever a planner has learnt of a tiny model."""


def prompts(seed: int, num_prompts: int = NUM_PROMPTS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[10 + rng.randrange(290) for _ in range(PROMPT_TOKENS)] for _ in range(num_prompts)]


def generate(url: str, ids: Sequence[int], *, num_tokens: int = 4, **more: Any) -> dict[str, Any]:
    """
    Raises:
        OSError: when there is no good answer.
    """
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": list(ids), "sampling_params": sampling, "kv_hints": MOVE, **more}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def status_of(url: str, timeout_s: float = 30.0) -> int:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@dataclass
class Sent:
    """What became of requests."""

    num_answered: int = 0
    failures: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    most_s: float = 0.0

    @property
    def cached_share(self) -> float:
        """Of what could have been found: all pages but the one that is always computed."""
        return self.cached_tokens / max(1, self.num_answered * (PROMPT_TOKENS - PAGE_TOKENS))

    def ask(self, url: str, ids: Sequence[int]) -> None:
        began_s = time.monotonic()
        try:
            answer = generate(url, ids)
        except (OSError, ValueError) as error:
            said = error.read().decode()[:300] if isinstance(error, urllib.error.HTTPError) else ""
            self.failures.append(f"{type(error).__name__}: {error} {said}")
            return
        self.num_answered += 1
        self.cached_tokens += answer["meta_info"]["cached_tokens"]
        self.most_s = max(self.most_s, time.monotonic() - began_s)


def once(url: str, asked: Sequence[Sequence[int]], num_at_once: int = 3) -> Sent:
    """Each prompt once."""
    sent = Sent()
    with ThreadPoolExecutor(num_at_once) as pool:
        list(pool.map(lambda ids: sent.ask(url, ids), asked))
    return sent


class Steady:
    """Prompts in turns, a few at a time, from ``with`` to its end."""

    def __init__(self, url: str, asked: Sequence[Sequence[int]], num_at_once: int = 3) -> None:
        self.sent = Sent()
        self._url = url
        self._asked = asked
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_at_once)]

    def __enter__(self) -> Steady:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._ends.wait(0.2):
            self.sent.ask(self._url, rng.choice(self._asked))
