# SPDX-License-Identifier: Apache-2.0
"""Requests by gRPC in place of HTTP (``--smg-grpc-mode``), where they come in: SGLang's servicer compares no ids, and
makes as many requests of one as its client wants samples. What else they say their ranks check.

Invariants
  1. An id is one request's for as long as the servicer knows it. The second one's would take its place: each gets
     tokens of the other, and one of them is never answered.
  2. Who names no id shares none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import clients
from banyan.sglang_plugin.prompt_refusals import BadRequest

T = TypeVar("T")


def around_request(
    original: Callable[..., T], manager: Any, obj: Any, request_id: str | None = None, *args: Any, **named: Any
) -> T:
    """For tokens, or for a vector.

    Raises:
        BadRequest: for too many samples.
    """
    if runtime.config() is not None:
        clients.check_num_samples(obj.sampling_params.n)
        # A client that leaves it out has said an empty one. Where there is none the servicer makes one.
        request_id = request_id or None
    return original(manager, obj, request_id, *args, **named)


def before_known(manager: Any, obj: Any, *_args: Any, **_named: Any) -> None:
    """Each sample, too: the servicer names it by its request.

    Raises:
        BadRequest: where a request of this id is under way.
    """
    if runtime.config() is not None and obj.rid in manager.rid_to_state:
        raise BadRequest(f"request_id: a request {obj.rid[:64]!r} is under way: use another id, or none")
