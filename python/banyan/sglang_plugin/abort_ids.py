# SPDX-License-Identifier: Apache-2.0
"""Whom an abort means: the request of that id, and those that SGLang, a gateway or Banyan has made of it: ``a_0``,
``a-1``, ``a-n2``, and by gRPC ``a-grpc3`` with its samples ``a-grpc3-0``. In SGLang it means all whose ids begin alike,
whoever has sent them."""

from __future__ import annotations

import re

GRPC = "-grpc"
_ONE_OF_SEVERAL = re.compile(rf"_\d+|-n?\d+|{GRPC}\d+(-\d+|-prefix)?")


def is_meant(rid: str, aborted: str) -> bool:
    """Whether an abort of ``aborted`` ends ``rid``."""
    return rid == aborted or (rid.startswith(aborted) and bool(_ONE_OF_SEVERAL.fullmatch(rid, len(aborted))))
