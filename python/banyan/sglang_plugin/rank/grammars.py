# SPDX-License-Identifier: Apache-2.0
"""The grammars that a rank keeps: a client may send another one with each request."""

from __future__ import annotations

from typing import Any

from banyan.sglang_plugin import runtime

MOST_GRAMMARS = 1024


def after_set_cache(result: None, backend: Any, key: Any, value: Any) -> None:
    """One more is kept. Where there are too many, the half that was made first goes."""
    if runtime.config() is not None and len(backend.cache) > MOST_GRAMMARS:
        for oldest in list(backend.cache)[: -MOST_GRAMMARS // 2]:
            backend.cache.pop(oldest, None)
