# SPDX-License-Identifier: Apache-2.0
"""SGLang keeps states of state-space models for pages of several tokens only on devices that it names; the CPU is none
of them, for want of two kernels. Banyan brings these (``rank.cpu_linear``), so with it the CPU engine is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from sglang.srt.utils import is_cpu

_is_banyans = False
"""Whether the arguments that are being resolved turn Banyan on."""


@contextlib.contextmanager
def resolved_for_banyan() -> Iterator[None]:
    """Arguments that turn Banyan on are resolved meanwhile."""
    global _is_banyans
    _is_banyans = True
    try:
        yield
    finally:
        _is_banyans = False


def around_platform_supports(original: Callable[[], bool]) -> bool:
    """Whether states may be kept beside the one that a request works on (``extra_buffer``)."""
    return original() or (_is_banyans and is_cpu())
