# SPDX-License-Identifier: Apache-2.0
"""Log lines for programs: one JSON object for each, instead of ``banyan: ...`` in the form of the log around it."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

PREFIX = "banyan: "
"""How every line of the product begins where people read it."""


class JsonLines(logging.Formatter):
    """``time``, ``level``, ``logger``, ``message``, and what the process is: ``context``."""

    def __init__(self, context: dict[str, str | int]) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {
            "time": at,
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._context,
            "message": record.getMessage().removeprefix(PREFIX),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


def log_as_json(logger: logging.Logger, **context: str | int) -> None:
    """From now on ``logger`` and those below it write JSON to stderr, and nothing to the loggers above."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonLines(context))
    logger.handlers[:] = [lines]
    logger.propagate = False
