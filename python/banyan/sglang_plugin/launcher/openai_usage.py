# SPDX-License-Identifier: Apache-2.0
"""What clients read in answers of the OpenAI-compatible API."""

from __future__ import annotations

from typing import Any


def after_cached_tokens_details_from_dict(answer: Any, details: dict[str, Any]) -> Any:
    """An OpenAI answer's breakdown is a closed model of device, host and storage: tokens of a peer, or of another
    node, count as host."""
    answer.host += details.get("peer", 0) + details.get("remote", 0)
    return answer
