# SPDX-License-Identifier: Apache-2.0
"""The dispatcher's hooks: place every request, and wait for messages instead of spinning."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from typing import Any

import zmq
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.runtime_context import get_schedule
from sglang.srt.utils.watchdog import SubprocessWatchdog

from banyan import _native, faults
from banyan.config import DEFAULT_PAGE_TOKENS, LEVEL_POLICY, SGLANG_POLICY, Config
from banyan.routing import POLICIES, Dispatcher, HotRankGuard, NoActiveRank, Policy, Wait
from banyan.routing.policies import DEFAULT_CHUNK_TOKENS, Level
from banyan.sglang_plugin import runtime, seams
from banyan.sglang_plugin.dispatcher.held_back import HeldBack
from banyan.sglang_plugin.dispatcher.placement import Placer, tell
from banyan.sglang_plugin.dispatcher.prefix_probe import PrefixProbe
from banyan.sglang_plugin.dispatcher.rank_watchdog import RankWatchdog
from banyan.telemetry import SERIES

POLL_MS = 200
"""How long the loop may sleep without a message; the watchdog wants to be fed more often than that by far."""

HELD_POLL_MS = 5
"""The same while requests are held back: how long one may wait after its pages have landed."""

MAX_DRAIN = 64
"""Messages handled between two looks at the watchdog."""


def after_init_dispatcher(result: None, controller: Any) -> None:
    """Put Banyan's placement in front of whichever dispatch method SGLang has chosen."""
    config = runtime.config()
    if config is None:
        return
    seams.verify("controller")
    controller.banyan_held = None
    controller.banyan_watchdog = None
    if not config.looks_up or not runtime.is_on("placement"):
        return
    carried = runtime.bookkeeping(controller.server_args)
    assert carried is not None
    rank_table = _native.RankTable.open(carried["rank_table"])
    faults.count_at(rank_table.count_failure)
    probe = PrefixProbe(
        rank_table, layout=carried["layout"], fetches=config.fetches, tokens_ahead=carried["tokens_ahead"]
    )
    tell_silent = _teller_of_silence(controller, rank_table)
    if config.policy == SGLANG_POLICY:
        controller.dispatching = _placing(lambda req: tell(req, probe.look_up(req), None), controller.dispatching)
    else:
        _have_placed(controller, config, probe, tell_silent)


def _have_placed(controller: Any, config: Config, probe: PrefixProbe, tell_silent: Callable[[int], None]) -> None:
    """From now on Banyan's policy chooses the ranks."""
    dispatcher = Dispatcher(
        controller.max_dp_size,
        _policy(config.policy),
        guard=HotRankGuard(config.hot_rank_factor, controller.server_args.page_size or DEFAULT_PAGE_TOKENS),
        out_of_reach=range(probe.layout.ranks_here.stop, probe.layout.num_ranks),
    )
    placer = Placer(
        probe, dispatcher, policy_name=config.policy, read_snapshots=controller.load_snapshot_reader.read_all
    )
    dispatch = controller.dispatching
    held_back = HeldBack(placer, dispatch)

    def place(req: Any) -> Wait | None:
        wait = (placer.place if held_back.has_room else placer.place_anew)(req, controller._active_workers)
        if wait is not None:
            held_back.begin(req, wait)
        return wait

    faults.hush(placer, "place_check")
    send_check = controller.dispatch_health_check

    def send_check_placed(check: Any) -> None:
        placer.place_check(check, controller._active_workers)
        send_check(check)

    def heed(silent: Set[int]) -> None:
        placer.silent = silent
        tell_silent(len(silent))

    controller.dispatching = _placing(place, dispatch)
    if not runtime.is_of_a_pair():
        # In a pair the room of a check may name its rank.
        controller.dispatch_health_check = send_check_placed
    controller.banyan_held = held_back
    controller.banyan_watchdog = RankWatchdog(lambda now_s: placer.unheard_s(now_s, controller._active_workers), heed)
    faults.hush(controller.banyan_watchdog, "look")


def _placing(place: Callable[[Any], Wait | None], dispatch: Callable[[Any], None]) -> Callable[[Any], None]:
    """What ``place`` does with a generation request, and then SGLang, unless it is to wait."""

    def dispatch_placed(req: Any) -> None:
        if isinstance(req, TokenizedGenerateReqInput):
            try:
                if place(req) is not None:
                    return
            except NoActiveRank:
                # SGLang's own method says so to the client.
                pass
            except BaseException as error:  # noqa: BLE001 - whatever it is, the request is served as in stock SGLang
                faults.note("dispatcher.place", error)
        dispatch(req)

    return dispatch_placed


def _teller_of_silence(controller: Any, rank_table: _native.RankTable) -> Callable[[int], None]:
    """What takes how many ranks stand still. ``/metrics`` has it from here: such a rank shows nothing any more, and
    where ranks step together none does."""
    if not controller.server_args.enable_metrics:
        return rank_table.set_num_silent
    # Not at the top: the library chooses its storage on import, from what SGLang has put into the environment.
    from prometheus_client import Gauge

    series = SERIES["num_silent_ranks"]
    gauge = Gauge(series.name, series.text, multiprocess_mode="mostrecent")

    def tell_and_show(num_silent: int) -> None:
        rank_table.set_num_silent(num_silent)
        gauge.set(num_silent)

    gauge.set(0)
    return tell_and_show


def _policy(name: str) -> Policy:
    if name != LEVEL_POLICY:
        return POLICIES[name]()
    # What one rank computes in a step; off or unknown, the policy has its own idea.
    return Level(max(get_schedule().chunked_prefill_size or 0, 0) or DEFAULT_CHUNK_TOKENS)


def around_event_loop(original: Callable[[Any], None], controller: Any) -> None:
    """The controller's loop with a poller in front: the upstream one tests an empty socket a million times a second."""
    wanted = runtime.config()
    if wanted is None:
        original(controller)
        return
    runtime.log_as_asked(wanted, "dispatcher")
    # Imported late: the name is the one the upstream loop uses, and tests of this module do without it.
    from sglang.srt.managers.io_struct import sock_recv

    _watch_ranks(controller)
    poller = zmq.Poller()
    poller.register(controller.recv_from_tokenizer, zmq.POLLIN)
    held: HeldBack | None = controller.banyan_held
    try:
        while True:
            controller.soft_watchdog.feed()
            is_holding = held is not None and held.num_held > 0
            if poller.poll(HELD_POLL_MS if is_holding else POLL_MS):
                _drain(controller, sock_recv)
            if held is not None and is_holding:
                held.send_on(controller._active_workers)
            if controller.banyan_watchdog is not None:
                controller.banyan_watchdog.look(time.monotonic())
    finally:
        # What fails here is said, and SGLang's own loop goes on: it sends nothing on.
        if held is not None:
            held.hold_no_more(controller._active_workers)


def _watch_ranks(controller: Any) -> None:
    """End the server when a rank's process has ended: SGLang watches the dispatcher only, goes on sending to the rank,
    and then waits for its answers for good. Where SGLang replaces ranks, they are its own to miss."""
    if not runtime.is_on("guards") or controller.server_args.elastic_ep_backend is not None:
        return
    processes = [process for process in controller.scheduler_procs if process is not None]
    names = [f"scheduler {number} of {len(processes)}" for number in range(1, len(processes) + 1)]
    SubprocessWatchdog(processes, names).start()


def _drain(controller: Any, receive: Callable[..., Any]) -> None:
    """Handle what has come, up to ``MAX_DRAIN`` messages."""
    for _ in range(MAX_DRAIN):
        try:
            message = receive(controller.recv_from_tokenizer, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EAGAIN:
                raise
            return
        if isinstance(message, AbortReq) and controller.banyan_held is not None:
            controller.banyan_held.abort(message, controller._active_workers)
        controller._request_dispatcher(message)
