# SPDX-License-Identifier: Apache-2.0
"""Why a process of the server does not start: it tells the main process, which says so last, and ends the server. And
the end of one that has started, which is the server's.

SGLang's main process knows of it by a signal, or by a pipe that closes: it says that memory may have run out, or ends
itself without a word, and the reason stands pages above.

Invariants
  1. The main process listens before it starts another one, and ends with the first words that it gets.
  2. Who has told waits to be ended: SGLang hears of it after that, or where nobody listens.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sglang.srt.utils import kill_process_tree

from banyan.sglang_plugin import runtime
from banyan.telemetry import start_thread

logger = logging.getLogger("banyan")

REFUSED, FAILED = 2, 1
"""Statuses with which a server ends."""

MOST_BYTES = select.PIPE_BUF
"""Of one process's words: a pipe takes them whole."""

GRACE_S = 30.0
"""How long who has told waits for its end."""

_ear: str | None = None


def listen() -> str:
    """Where other processes of this server tell. The same one for all that this process starts."""
    global _ear
    if _ear is None:
        reading, writing = os.pipe()
        start_thread(
            partial(_end_at_words, reading),
            name="banyan-last-words",
            feature="telling why a process does not start",
        )
        _ear = f"/proc/{os.getpid()}/fd/{writing}"
    return _ear


def _end_at_words(reading: int) -> None:
    with os.fdopen(reading) as words:
        said = json.loads(words.readline())
    kill_process_tree(os.getpid(), include_parent=False, wait_timeout=None)
    sys.stdout.flush()
    print(said["line"], file=sys.stderr, flush=True)
    # Not SystemExit: SGLang's own words would come after these.
    os._exit(said["status"])


def tell(ear: str, line: str, *, status: int) -> None:
    """Have the main process end the server with this line."""
    words = _words(line, status)
    try:
        with Path(ear).open("w") as pipe:
            pipe.write(words)
    except OSError as error:
        logger.warning("banyan: the main process cannot be told why this one ends: %s", error)
        return
    time.sleep(GRACE_S)


def _words(line: str, status: int) -> str:
    """ASCII, of which a character of the line is twelve at most."""
    line = line[: MOST_BYTES // 2]
    while len(words := json.dumps({"line": line, "status": status}) + "\n") > MOST_BYTES:
        line = line[: len(line) * 3 // 4]
    return words


def hear_of_ends() -> None:
    """From now on the server ends with its ranks, dispatcher and detokenizer also where it has several HTTP workers:
    their supervisor takes the signal by which SGLang's main process hears of an end, and has no answer to it."""
    # Not at the top: the other processes have no use for it.
    from uvicorn.supervisors import Multiprocess

    setattr(Multiprocess, "handle_quit", _end_with_others)  # noqa: B010 - it has none


def _end_with_others(supervisor: Any) -> None:
    kill_process_tree(os.getpid(), include_parent=False, wait_timeout=None)
    logger.error("banyan: a process of this server has ended, as is said above: so does the server")
    raise SystemExit(FAILED)


def end_from_worker(line: str) -> NoReturn:
    """An HTTP worker does not start, and so neither does the server: its supervisor would end without an error."""
    from uvicorn.config import STARTUP_FAILURE

    print(line, file=sys.stderr, flush=True)
    supervisor = multiprocessing.parent_process()
    if supervisor is not None and supervisor.pid is not None:
        os.kill(supervisor.pid, signal.SIGQUIT)
    # With any other status this worker would be started again and again.
    raise SystemExit(STARTUP_FAILURE)


def around_init(original: Callable[..., None], process: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang builds what a process is for: a rank's scheduler, the dispatcher."""
    try:
        original(process, server_args, *args, **kwargs)
    except Exception as error:
        carried = runtime.bookkeeping(server_args)
        if carried is not None:
            _tell_of(error, type(process).__name__, carried["ear"])
        raise


def _tell_of(error: Exception, name: str, ear: str) -> None:
    if isinstance(error, runtime.Refused):
        tell(ear, f"{runtime.REFUSED}{error}", status=REFUSED)
        return
    logger.error("banyan: SGLang's %s does not start", name, exc_info=error)
    reason = f"{type(error).__name__}: {error}".replace("\n", " ")
    tell(ear, f"banyan: SGLang's {name} does not start (its traceback is above): {reason}", status=FAILED)
