# SPDX-License-Identifier: Apache-2.0
"""What ``/metrics`` tells of the router. One registry for each router: a process may hold several (tests do)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from banyan.router.blocks import STORE
from banyan.router.call import KnownTenant
from banyan.router.fleet import Place, Server
from banyan.router.read_path import ReadPath
from banyan.router.verdict import Outcome
from banyan.routing.hint import NOBODY, SourceHint

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counters are told; gauges are read when they are asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry, "namespace": "banyan_router"}
        self.requests = Counter("requests", "Requests, by path and status.", ("path", "status"), **made)
        self.attempts = Counter("attempts", "Requests sent on, by how they ended.", ("server", "outcome"), **made)
        self.retries = Counter("retries", "Requests that went on to another server.", **made)
        self.not_retried = Counter(
            "requests_not_retried",
            "Requests that were lost with a server and kept from others, by reason.",
            ("reason",),
            **made,
        )
        self.tasks_ended = Counter(
            "tasks_ended", "Probes and subscriptions that a fault has ended, and that began again.", ("task",), **made
        )
        self.refused = Counter("refused", "Requests that no server was asked about, by status.", ("status",), **made)
        self.choices = Counter("choices", "Placements, by what decided.", ("server", "reason"), **made)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of placed prompts.", **made)
        self.cached_tokens = Counter("cached_tokens", "Of these, expected in the cache of the chosen target.", **made)
        self.untokenised = Counter("untokenised", "Text prompts that were placed without their tokens.", **made)
        self.placed_by_load = Counter(
            "placed_by_load", "Requests of whose prompt nothing was known, by path.", ("path",), **made
        )
        tenant: dict[str, Any] = {"labelnames": ("tenant",), **made}
        self.tenant_requests = Counter("tenant_requests", "Requests that were placed, by tenant.", **tenant)
        self.tenant_prompt_tokens = Counter("tenant_prompt_tokens", "Tokens of their prompts, by tenant.", **tenant)
        self.tenant_cached_tokens = Counter(
            "tenant_cached_tokens", "Of these, expected in the cache of the chosen target, by tenant.", **tenant
        )
        self.tenants_stale = Gauge("tenants_stale", "1: --tenants-file is wrong, what it said before counts.", **made)
        self.dropped_lines = Counter("dropped_lines", "Lines that --drop-line took out of requests.", **made)
        self.event_batches = Counter("event_batches", "KV event batches, by server.", ("server",), **made)
        self.published_loads = Counter(
            "published_loads", "Loads that ranks published without being asked, by server.", ("server",), **made
        )
        self.given_tokens = Counter(
            "given_tokens", "Tokens that servers of pairs were given to read from their stores.", ("server",), **made
        )
        self.sources = Counter(
            "sources",
            "Requests whose server was told whose arena has more of them: by page server, or none.",
            ("server", "source"),
            **made,
        )
        self.first_byte = Histogram(
            "first_byte_seconds", "From the request to its answer's first byte.", buckets=SECONDS, **made
        )
        self._up = Gauge("server_up", "1: takes requests.", ("server",), **made)
        self._in_flight = Gauge("in_flight", "Requests at a server.", ("server",), **made)
        self._blocks = Gauge("known_blocks", "Blocks that a server's ranks hold, as events tell.", ("server",), **made)
        self._stored = Gauge(
            "known_stored_blocks", "Of these, blocks in the store, as far as told.", ("server",), **made
        )
        self._holes = Gauge("event_holes", "Times since a server's start when events were lost.", ("server",), **made)
        self._waiting = Gauge("waiting", "Requests that wait in the router.", **made)

    def placed(self, place: Place, tenant: KnownTenant | None = None) -> None:
        self.chosen(place)
        self.prompt_tokens.inc(place.num_tokens)
        self.cached_tokens.inc(place.cached_tokens)
        if tenant is not None:
            self.tenant_requests.labels(tenant.name).inc()
            self.tenant_prompt_tokens.labels(tenant.name).inc(place.num_tokens)
            self.tenant_cached_tokens.labels(tenant.name).inc(place.cached_tokens)

    def forget_tenants(self, names: Collection[str]) -> None:
        """These are tenants no more: so there are never more labels than tenants in a file."""
        for counter in (self.tenant_requests, self.tenant_prompt_tokens, self.tenant_cached_tokens):
            for name in names:
                with contextlib.suppress(KeyError):
                    counter.remove(name)

    def chosen(self, place: Place) -> None:
        """A place whose prompt is counted elsewhere."""
        self.choices.labels(place.target.server.url, place.choice.reason.value).inc()

    def reads(self, path: ReadPath) -> None:
        """What the two servers of a pair were given to read."""
        self.given_tokens.labels(path.prefill.url).inc(path.num_prefill_tokens)
        self.given_tokens.labels(path.decode.url).inc(path.num_decode_tokens)

    def told(self, server: Server, source: SourceHint) -> None:
        """What a server was told of a request that it gets."""
        # Each page server for itself: of sets of page servers there may be more than anybody can count.
        for page_server in source.page_servers or (NOBODY,):
            self.sources.labels(server.url, str(page_server)).inc()

    def ended(self, server: str, outcome: Outcome) -> None:
        self.attempts.labels(server, outcome.value).inc()

    def render(self, servers: Sequence[Server], num_waiting: int) -> bytes:
        """All of them, in Prometheus' text format."""
        self._waiting.set(num_waiting)
        for server in servers:
            for outcome in Outcome:
                # A series that begins with its first count never rises.
                self.attempts.labels(server.url, outcome.value)
            self._up.labels(server.url).set(server.takes_requests)
            self._in_flight.labels(server.url).set(len(server.in_flight))
            self._holes.labels(server.url).set(sum(feed.num_holes for feed in server.feeds))
            self._blocks.labels(server.url).set(sum(len(feed.blocks) for feed in server.feeds))
            self._stored.labels(server.url).set(sum(feed.blocks.num_in(STORE) for feed in server.feeds))
        return generate_latest(self.registry)
