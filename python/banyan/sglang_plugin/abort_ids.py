# SPDX-License-Identifier: Apache-2.0
"""Whom an abort means: the request of that id, and those that SGLang, or a gateway, has made of it: ``a_0``, ``a-1``,
``a-n2``. In SGLang it means all whose ids begin alike, whoever has sent them."""

from __future__ import annotations

import re

_ONE_OF_SEVERAL = re.compile(r"_\d+|-n?\d+")


def is_meant(rid: str, aborted: str) -> bool:
    """Whether an abort of ``aborted`` ends ``rid``."""
    return rid == aborted or (rid.startswith(aborted) and bool(_ONE_OF_SEVERAL.fullmatch(rid, len(aborted))))
