# SPDX-License-Identifier: Apache-2.0
"""What this process knows of prefill times: the profile it was started with, and what its forwards have shown since.

One ``PrefillTimes`` for planning, learning all the time. The compute quota uses the same, except with tensor
parallelism: the shards of a rank must cut a request at the same token, so they use the profile as it is.
"""

from __future__ import annotations

import functools
from pathlib import Path

from banyan.planner import PrefillTimes, Profile, profile
from banyan.planner.quota import QuotaMeter
from banyan.sglang_plugin import runtime


@functools.cache
def loaded_profile() -> Profile | None:
    """The profile that was asked for, or None. The main process has read it before: it is good."""
    config = runtime.config()
    return None if config is None or config.profile is None else profile.load(Path(config.profile))


@functools.cache
def times() -> PrefillTimes:
    """The prefill times of this rank; the linker feeds them with every forward."""
    return _profiled_times()


@functools.cache
def _fixed_times() -> PrefillTimes:
    return _profiled_times()


def _profiled_times() -> PrefillTimes:
    profiled = loaded_profile()
    return PrefillTimes(None if profiled is None else profiled.cost)


def meter(*, page_tokens: int, tp_size: int) -> QuotaMeter | None:
    """The meter of the next forward, or None without a quota."""
    config = runtime.config()
    if config is None or config.prefill_quota_ms is None:
        return None
    return QuotaMeter(
        times() if tp_size == 1 else _fixed_times(),
        quota_us=config.prefill_quota_ms * 1000.0,
        page_tokens=page_tokens,
    )
