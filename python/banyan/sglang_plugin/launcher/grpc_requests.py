# SPDX-License-Identifier: Apache-2.0
"""Requests by gRPC in place of HTTP (``--smg-grpc-mode``), where they come in: SGLang's servicer compares no ids, and
makes as many requests of one as its client wants samples. What else they say their ranks check.

Invariants
  1. The servicer and its ranks know no id twice, whatever clients name: of two that it knows by one id each gets tokens
     of the other, and one is never answered. It forgets an id before its ranks have, and five seconds after its end
     whoever has it by then.
  2. An abort of what a client has named means all that was made of it (``abort_ids``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.abort_ids import GRPC
from banyan.sglang_plugin.launcher import clients

T = TypeVar("T")

_numbers = itertools.count(1)


def around_request(
    original: Callable[..., T], manager: Any, obj: Any, request_id: str | None = None, *args: Any, **named: Any
) -> T:
    """For tokens, or for a vector.

    Raises:
        BadRequest: for too many samples.
    """
    if runtime.config() is not None:
        clients.check_num_samples(obj.sampling_params.n)
        request_id = f"{request_id or ''}{GRPC}{next(_numbers)}"
    return original(manager, obj, request_id, *args, **named)
