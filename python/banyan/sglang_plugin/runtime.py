# SPDX-License-Identifier: Apache-2.0
"""What this process knows of Banyan: the configuration that travelled with SGLang's arguments, and how to refuse.

States of a process: unknown (before SGLang publishes its arguments) -> off or on; on -> ``turn_off`` -> off, for good.
States of a feature (``banyan.feature_list``) in a process: on -> off, for good; the main process decides before it
starts the others, which hear of it before they register a hook.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from typing import Any, NoReturn

from sglang.srt.runtime_context import get_device, get_server_args
from sglang.srt.utils import is_cpu

from banyan import config as environment
from banyan import faults
from banyan.config import Config
from banyan.refusals import REFUSED
from banyan.telemetry import Stopwatch, log_as_json

STOPWATCH = Stopwatch(time.perf_counter_ns)
"""What this process spends in Banyan's hooks, on its main thread: a scheduler's own."""

BOOKKEEPING = "_banyan"
"""Attribute of ServerArgs: underscore names are never sealed and are pickled to every child process."""

IS_OFF = "_banyan_is_off"
"""Another one, in its place: Banyan was asked for and does not fit this SGLang, which has been said."""


def bookkeeping(server_args: Any) -> dict[str, Any] | None:
    """What the main process left for the others, or None when Banyan is off."""
    return getattr(server_args, BOOKKEEPING, None)


def config() -> Config | None:
    """The configuration of this server, or None when Banyan is off."""
    carried = bookkeeping(get_server_args())
    return None if carried is None else carried["config"]


def was_asked_for() -> bool:
    """Whether this server was started with ``--enable-banyan``, also where it is off for all that."""
    args = get_server_args()
    return bookkeeping(args) is not None or getattr(args, IS_OFF, False)


def log_as_asked(wanted: Config | None, process: str, **rank: int) -> None:
    """Write this process's log lines in the form that the user wants. Called before the first of them."""
    if wanted is not None and wanted.log_json:
        log_as_json(logging.getLogger("banyan"), process=process, **rank)


def server_id() -> str:
    """What this server's processes call it among themselves; of a server that shares."""
    carried = bookkeeping(get_server_args())
    assert carried is not None
    return str(carried["server"])


def is_sharing() -> bool:
    """Whether this process shares pages (as opposed to: off, or on without sharing)."""
    active = config()
    return active is not None and active.shares and not _is_off


_is_off = False


def turn_off() -> None:
    """This process shares nothing: what it would share with could not be built."""
    global _is_off
    _is_off = True


_features_off: set[str] = set()
"""Features, and patches of features that are severable."""


def is_on(*names: str) -> bool:
    """Whether a feature is on in this process; or a patch of one, by the names of both."""
    return _features_off.isdisjoint(names)


def switch_off(*names: str) -> None:
    """These are off from now on, in this process and in those that it starts."""
    _features_off.update(names)
    environment.tell_switched_off(_features_off)


def heed_main() -> None:
    """Switch off what the main process has. SGLang loads plugins before a process knows its arguments."""
    _features_off.update(environment.switched_off())


def features_off() -> list[str]:
    """What is off in this process."""
    return sorted(_features_off)


def needed() -> list[str]:
    """The features that this server cannot do without."""
    carried = bookkeeping(get_server_args())
    return [] if carried is None else carried["needed"]


def disaggregation_mode() -> str:
    """What this server does in a pair, in SGLang's words; "null" where it serves by itself."""
    return str(get_server_args().disaggregation_mode)


def is_of_a_pair() -> bool:
    """Whether this server prefills or decodes only."""
    return disaggregation_mode() != "null"


def device_of(server_args: Any) -> str:
    """What SGLang runs on, of arguments as they were given or as it has resolved them."""
    return server_args.device or ("cpu" if is_cpu() else "cuda")


def is_on_gpu() -> bool:
    """Whether this server's pools lie on a GPU."""
    # What SGLang has resolved: the argument itself is None unless the user gave it.
    return bool(get_device().device == "cuda")


_is_rank = False


def become_rank() -> None:
    """This process, which somebody else started, is a rank of SGLang's. Called before hooks are registered."""
    global _is_rank
    _is_rank = True


def is_main_process() -> bool:
    """Whether this is the process that the user started, as opposed to one that SGLang spawned, or had started."""
    return multiprocessing.parent_process() is None and not _is_rank


_is_front = False


def become_front() -> None:
    """This is one of the processes in which SGLang answers HTTP where there are several (``--tokenizer-worker-num``):
    it does for its clients what the main process does elsewhere. Called before hooks are registered."""
    global _is_front
    _is_front = True


def is_front() -> bool:
    """Whether this is one of these processes."""
    return _is_front


def answers_clients() -> bool:
    """Whether clients' requests come to this process first."""
    return is_main_process() or _is_front


class Refused(RuntimeError):
    """Banyan cannot serve here. Raised in child processes: the whole server ends with it (``last_words``)."""


faults.let_pass(Refused)


def refuse(*lines: str) -> NoReturn:
    """End the server with one line for each reason.

    Raises:
        SystemExit: in the main process, before anything was started.
        Refused: in the others.
    """
    for line in lines:
        print(f"{REFUSED}{line}", file=sys.stderr, flush=True)
    if is_main_process():
        raise SystemExit(2)
    raise Refused("; ".join(lines))
