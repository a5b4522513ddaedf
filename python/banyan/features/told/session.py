# SPDX-License-Identifier: Apache-2.0
"""How sessions are called where prefixes are kept for them: pure. A hash, so that nobody keeps a client's words."""

from __future__ import annotations

import hashlib
from typing import Any

NAME_BYTES = 16


def name_of(session_id: str) -> str:
    return hashlib.blake2b(session_id.encode(errors="surrogatepass"), digest_size=NAME_BYTES).hexdigest()


def named_by(asked: Any) -> str | None:
    """The name of the session that SGLang is to close, of a request for it; None where it has none."""
    params = getattr(asked, "session_params", None)
    of_params = params.get("id") if isinstance(params, dict) else getattr(params, "id", None)
    said = getattr(asked, "session_id", None) or of_params
    return name_of(said) if isinstance(said, str) and said else None
