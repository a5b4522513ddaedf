# SPDX-License-Identifier: Apache-2.0
"""What users see of Banyan: ``peer`` in a request's cached tokens, ``banyan`` in /server_info, counters in /metrics."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from banyan.core import PrefixSpan
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.hook_queue import known_by
from banyan.sglang_plugin.rank import requests
from banyan.telemetry import SERIES, Counters, gauges_of

_linker: weakref.ref[Any] | None = None
_exporter: _Exporter | None = None

FLUSH_PERIOD_S = 1.0


_counts_prompts = True


def start(linker: Any, *, counts_prompts: bool, enable_metrics: bool, labels: dict[str, str]) -> None:
    """Report this linker's numbers from now on. ``counts_prompts``: what SGLang tells of them was found here."""
    global _exporter, _linker, _counts_prompts
    _linker = weakref.ref(linker)
    _counts_prompts = counts_prompts
    if enable_metrics:
        _exporter = _Exporter(linker, labels)


def counters() -> Counters:
    """Of this process's rank; of nobody, where SGLang has built no linker."""
    linker = _linker() if _linker is not None else None
    return Counters() if linker is None else linker.counters


def tick() -> None:
    """Called on every scheduling step: brings /metrics up to date about once a second."""
    if _exporter is not None:
        _exporter.flush_if_due(time.monotonic())


_CACHED_TOKENS = attrgetter("cached_tokens", "cached_tokens_device", "cached_tokens_host", "cached_tokens_storage")


def told_details(streamer: Any, req: Any) -> tuple[dict[str, Any] | None] | None:
    """What this request's answer has been told already, while SGLang's own figures of it are the same."""
    told = getattr(req, "banyan_told", None)
    return told[1] if told is not None and told[0] == _CACHED_TOKENS(req) else None


@known_by(told_details)
def around_get_cached_tokens_details(
    original: Callable[[Any, Any], dict[str, Any] | None], streamer: Any, req: Any
) -> dict[str, Any] | None:
    """SGLang books what a linker loads as "host"; tokens are named after the tier that they came from. Beside them
    stands what the rank saw of the prompt: its own prefix, the longest one, and who holds that. Answers have all of
    this or nothing, as the flags say."""
    details, config = original(streamer, req), runtime.config()
    if config is None:
        return details
    if not config.shares:
        details = details if config.answer_details else None
        req.banyan_told = _CACHED_TOKENS(req), (details,)
        return details
    _count_once(details or {}, req)
    answer = _details(details, req) if config.answer_details else None
    if getattr(req, "banyan_is_counted", False):
        # Asked for each stream in each step. What an answer has begun with stays.
        req.banyan_told = _CACHED_TOKENS(req), (answer,)
    return answer


def _details(details: dict[str, Any] | None, req: Any) -> dict[str, Any] | None:
    span, parting = requests.span_of(req), requests.parting_of(req)
    if details is None and parting is None and not (span and span.max_tokens):
        return None
    details = {"device": 0, "host": 0} if details is None else details
    return {
        **details,
        **_by_tier(details, req),
        **{f"computed_{why.value}": num_tokens for why, num_tokens in getattr(req, "banyan_computed", {}).items()},
        **({} if parting is None else {"parted_at": parting.place, "parted_prompts": parting.num_prompts}),
        **({} if span is None else _fields_of(span, own_tokens=details["device"])),
    }


def _by_tier(details: dict[str, Any], req: Any) -> dict[str, int]:
    """What was loaded, by where it was."""
    loaded = details.get("host", 0)
    tokens: dict[str, int] = getattr(req, "banyan_tokens", {})
    peer = min(tokens.get("peer", 0), loaded)
    storage = min(tokens.get("storage", 0), loaded - peer)
    remote = min(tokens.get("remote", 0), loaded - peer - storage)
    return {
        "peer": peer,
        "host": loaded - peer - storage - remote,
        "storage": storage,
        **({"remote": remote} if remote else {}),
    }


def _count_once(details: dict[str, Any], req: Any) -> None:
    """Count a prompt with its first answer: SGLang asks again with every token of a stream."""
    linker = _linker() if _linker is not None else None
    if linker is None or getattr(req, "banyan_is_counted", False) or _is_ahead_of_samples(req):
        return
    if req.discard_output_reason is not None:
        # Its pages did not land: it has no answer, and the run after it counts.
        return
    req.banyan_is_counted = True
    if not _counts_prompts:
        return
    tiers = _by_tier(details, req)
    linker.counters.count_prompt(
        len(req.origin_input_ids),
        own=details.get("device", 0),
        peer=tiers["peer"],
        # Another node's pages come by way of the arena, too.
        host=tiers["host"] + tiers.get("remote", 0),
        store=tiers["storage"],
    )
    req.banyan_computed = linker.computed(req, details.get("device", 0) + sum(tiers.values()))


def _is_ahead_of_samples(req: Any) -> bool:
    """Whether this is the run with which SGLang puts a prompt into the cache before several samples of it (``n``):
    nobody gets its answer, and theirs say how much of the prompt was cached then."""
    wanted = req.sampling_params
    return bool(wanted.n > 1 and wanted.max_new_tokens == 0)


def _fields_of(span: PrefixSpan, *, own_tokens: int) -> dict[str, int]:
    """In the words of the request's fields. A prompt that lies in the rank's own tree is not looked up elsewhere."""
    origin_tokens = max(span.origin_tokens, own_tokens)
    return {
        "dp_origin_kv_len": origin_tokens,
        "dp_max_kv_len": max(span.max_tokens, origin_tokens),
        "dp_max_kv_rank": span.max_rank,
    }


def after_get_internal_state(output: Any, controller: Any, recv_req: Any) -> None:
    linker = _linker() if _linker is not None else None
    if linker is not None:
        # What SGLang keeps from eviction; of an idle server nothing.
        locked = {"num_locked_tokens": controller.scheduler.tree_cache.protected_size()}
        output.internal_state["banyan"] = linker.state() | locked


class _Exporter:
    """Writes this rank's state into Prometheus' multiprocess files.

    All processes of a server share one directory of such files, and /metrics only reads the files: a collector of
    this process would never be asked. So the values are set from the scheduler's own steps.
    """

    def __init__(self, linker: Any, labels: dict[str, str]) -> None:
        # Not at the top: the library chooses its storage on import, from what SGLang has put into the environment.
        from prometheus_client import Counter, Gauge

        def made(name: str) -> Any:
            series = SERIES[name]
            if series.is_counter:
                return Counter(series.name, series.text, labelnames=list(labels)).labels(**labels)
            gauge = Gauge(series.name, series.text, labelnames=list(labels), multiprocess_mode="mostrecent")
            return gauge.labels(**labels)

        self._linker = weakref.proxy(linker)
        self._next_s = 0.0
        # One for each value that this rank has: without a store there is nothing to say of one.
        self._series = {name: made(name) for name in self._values()}
        self._counted = dict.fromkeys(self._series, 0.0)

    def _values(self) -> dict[str, float]:
        return {**self._linker.counters_now().as_dict(), **gauges_of(self._linker.figures())}

    def flush_if_due(self, now_s: float) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + FLUSH_PERIOD_S
        values = self._values()
        for name, shown in self._series.items():
            # What has gone since, as a tier while the weights change, keeps its last value.
            if name not in values:
                continue
            if SERIES[name].is_counter:
                self._count(name, shown, values[name])
            else:
                shown.set(values[name])

    def _count(self, name: str, shown: Any, value: float) -> None:
        """A counter goes on by what has come; one that is below what it was has begun anew, as that of a tier that was
        opened again."""
        before, self._counted[name] = self._counted[name], value
        shown.inc((value - before if value >= before else value) * SERIES[name].scale)
