# SPDX-License-Identifier: Apache-2.0
"""What a server does in a pair: which tiers it reads, what it writes, what its process inherits, what is said of it.

A prefill server reads ahead and writes prompts. A decode server reads from the store only what prefill servers ask it
for: SGLang asks no linker there. It writes what was generated behind the prompts that it was handed, and the next
turn's prefill server finds that in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

DEFERRED_RELEASE_S = 300
"""How long a decode server keeps pages that a silent prefill server may still write into. SGLang's
30 s end before many time-outs do, and a write that comes later lands in another request's pages."""

TRAFFIC_CLASS = ("UCX_IB_TRAFFIC_CLASS", "MC_IB_TC")
SERVICE_LEVEL = ("UCX_IB_SL", "MC_IB_SL")
"""What NIXL's UCX and Mooncake read."""

OTHER_WEIGHTS = (
    "the prefill server has other weights, adapters or flags of the model than the decode server, or pages of others, "
    "which the decode server would keep as its own: load the same into both"
)
"""Why such a hand-over fails."""


class Role(StrEnum):
    """In SGLang's words for ``--disaggregation-mode``."""

    ALONE = "null"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def is_paired(self) -> bool:
        """Whether another server has a part in each request. Such a request cannot be run again here, and none can be
        made here: the room in which the two meet is used up, or was never agreed on."""
        return self is not Role.ALONE

    @property
    def reads_ahead(self) -> bool:
        """Whether a request's arrival makes it read what only the store holds."""
        return self is not Role.DECODE

    @property
    def keeps_answers_only(self) -> bool:
        """Whether prompts are another server's to keep."""
        return self is Role.DECODE

    @property
    def learns_from_others(self) -> bool:
        """Whether most of what the store holds for its requests was written by other servers a moment ago."""
        return self is Role.PREFILL


def environment(
    role: Role,
    *,
    on_gpu: bool,
    transfer: str = "nixl",
    dscp: int | None = None,
    ib_service_level: int | None = None,
) -> Mapping[str, str]:
    """What the server's processes inherit, where the user has set nothing else. ``transfer``: what hands pages over."""
    variables: dict[str, str] = {}
    if role.is_paired and dscp is not None:
        # RoCE's traffic class is the byte that has the DSCP in its upper six bits.
        variables |= dict.fromkeys(TRAFFIC_CLASS, str(dscp << 2))
    if role.is_paired and ib_service_level is not None:
        variables |= dict.fromkeys(SERVICE_LEVEL, str(ib_service_level))
    if role is Role.DECODE:
        variables["SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"] = str(DEFERRED_RELEASE_S)
    if (role is Role.PREFILL and transfer == "nixl") or (role.is_paired and not on_gpu):
        # SGLang orders an early send behind the forward by a CUDA event, for which its senders by NIXL do not wait.
        variables["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"
    if role.is_paired and not on_gpu:
        # Its eight threads are for network cards; here they would take the cores that compute.
        variables["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] = '{"num_threads": "1"}'
    return variables


def notes(role: Role, *, has_store: bool, tp_size: int) -> list[str]:
    """What is said once at the start of a server with this role."""
    if not role.is_paired:
        return []
    if not has_store:
        what = "answers are not kept for others" if role is Role.DECODE else "answers are computed again as prompts"
        return [f"{role.value} server without --banyan-store: {what}"]
    return [
        f"{role.value} server: shares by way of --banyan-store with servers of the same weights, page size and "
        f"--tp-size {tp_size}"
    ]
