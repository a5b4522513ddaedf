# SPDX-License-Identifier: Apache-2.0
"""What users see of Banyan: ``peer`` in a request's cached tokens, ``banyan`` in /server_info, counters in /metrics."""

from __future__ import annotations

import time
import weakref
from typing import Any

from banyan.core import PrefixSpan
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import requests
from banyan.telemetry import DESCRIPTIONS

_linker: weakref.ref[Any] | None = None
_exporter: _Exporter | None = None

FLUSH_PERIOD_S = 1.0


def start(linker: Any, *, enable_metrics: bool, labels: dict[str, str]) -> None:
    """Report this linker's numbers from now on."""
    global _exporter, _linker
    _linker = weakref.ref(linker)
    if enable_metrics:
        _exporter = _Exporter(linker, labels)


def tick() -> None:
    """Called on every scheduling step: brings /metrics up to date about once a second."""
    if _exporter is not None:
        _exporter.flush_if_due(time.monotonic())


def after_get_cached_tokens_details(details: dict[str, Any] | None, streamer: Any, req: Any) -> dict[str, Any] | None:
    """SGLang books what a linker loads as "host"; tokens are named after the tier that they came from. Beside them
    stands what the rank saw of the prompt: its own prefix, the longest one, and who holds that."""
    if not runtime.is_sharing():
        return None
    span = requests.span_of(req)
    if details is None and not (span and span.max_tokens):
        return None
    details = {"device": 0, "host": 0} if details is None else details
    loaded = details.get("host", 0)
    tokens: dict[str, int] = getattr(req, "banyan_tokens", {})
    peer = min(tokens.get("peer", 0), loaded)
    storage = min(tokens.get("storage", 0), loaded - peer)
    return {
        **details,
        "peer": peer,
        "host": loaded - peer - storage,
        "storage": storage,
        **({} if span is None else _fields_of(span, own_tokens=details["device"])),
    }


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
        from prometheus_client import Gauge

        self._linker = weakref.proxy(linker)
        self._next_s = 0.0
        self._gauges = {
            name: Gauge(f"banyan:{name}", text, labelnames=list(labels), multiprocess_mode="mostrecent").labels(
                **labels
            )
            for name, text in DESCRIPTIONS.items()
        }

    def flush_if_due(self, now_s: float) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + FLUSH_PERIOD_S
        values = self._linker.counters_now().as_dict()
        for name, gauge in self._gauges.items():
            gauge.set(values[name])
