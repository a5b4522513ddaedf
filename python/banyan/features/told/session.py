# SPDX-License-Identifier: Apache-2.0
"""Which session a request is of, where prefixes are kept for sessions: pure."""

from __future__ import annotations

from typing import Any

from banyan.routing.conversation import name_of


def named_by(asked: Any) -> str | None:
    """The name of the session that SGLang is to close, of a request for it; None where it has none."""
    params = getattr(asked, "session_params", None)
    of_params = params.get("id") if isinstance(params, dict) else getattr(params, "id", None)
    said = getattr(asked, "session_id", None) or of_params
    return name_of(said) if isinstance(said, str) and said else None
