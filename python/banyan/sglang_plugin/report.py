# SPDX-License-Identifier: Apache-2.0
"""What users see of Banyan: ``peer`` in a request's cached tokens, ``banyan`` in /server_info, counters in /metrics."""

from __future__ import annotations

import time
import weakref
from typing import Any

from banyan.sglang_plugin import runtime
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
    """SGLang books what a linker loads as "host"; tokens are named after the tier that they came from."""
    if details is None or not runtime.is_sharing():
        return None
    loaded = details.get("host", 0)
    tokens: dict[str, int] = getattr(req, "banyan_tokens", {})
    peer = min(tokens.get("peer", 0), loaded)
    storage = min(tokens.get("storage", 0), loaded - peer)
    return {**details, "peer": peer, "host": loaded - peer - storage, "storage": storage}


def after_cached_tokens_details_from_dict(answer: Any, details: dict[str, Any]) -> Any:
    """An OpenAI answer's breakdown is a closed model of device, host and storage: a peer's tokens count as host."""
    answer.host += details.get("peer", 0)
    return answer


def after_get_internal_state(output: Any, controller: Any, recv_req: Any) -> None:
    linker = _linker() if _linker is not None else None
    if linker is not None:
        output.internal_state["banyan"] = linker.state()


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
