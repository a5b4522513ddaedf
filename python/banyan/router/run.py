# SPDX-License-Identifier: Apache-2.0
"""Serves the router until it is told to stop, and then ends what is running."""

from __future__ import annotations

import logging
import signal
from types import FrameType

import uvicorn

from banyan.router.app import Router, build
from banyan.router.connections import bounded, take_open_files
from banyan.router.settings import Settings
from banyan.telemetry import log_as_json

logger = logging.getLogger("banyan.router")


class _Server(uvicorn.Server):
    """uvicorn, which tells the router that it stops: requests on open connections get 503 from then on."""

    def __init__(self, config: uvicorn.Config, router: Router) -> None:
        super().__init__(config)
        self._router = router

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._router.is_stopping = True
        super().handle_exit(sig, frame)


def serve(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM; the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if settings.log_json:
        log_as_json(logger, process="router")
    take_open_files()
    app, router = build(settings)
    logger.info("http://%s:%d, %s, in front of %s", settings.host, settings.port, settings.policy, settings.urls)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        lifespan="on",
        # A connection that was made one is none that is bounded.
        ws="none",
        # Whom a request comes from decides who may drain servers.
        proxy_headers=False,
        http=bounded(len(settings.urls), settings.idle_timeout_s),
        timeout_graceful_shutdown=int(settings.drain_timeout_s),
    )
    server = _Server(config, router)
    if settings.tenants_file:
        signal.signal(signal.SIGHUP, lambda *_: router.tenant_rules.read_again())
    server.run()
    return 0 if server.started else 1
