# SPDX-License-Identifier: Apache-2.0
"""What a server of a pair needs before its start: SGLang's flags, what its processes inherit, and what is said once."""

from __future__ import annotations

import logging

from banyan import config
from banyan.feature import Asked
from banyan.features.pairs.roles import Role, environment, notes

logger = logging.getLogger("banyan")


def launched(asked: Asked) -> None:
    role, wanted = Role(asked.disaggregation_mode), asked.config
    marks = {"dscp": wanted.dscp, "ib_service_level": wanted.ib_service_level}
    transfer = str(getattr(asked.args, "disaggregation_transfer_backend", "nixl"))
    config.inherit(environment(role, on_gpu=asked.device != "cpu", transfer=transfer, **marks))
    if wanted.shares:
        _take_role(role, asked)


def _take_role(role: Role, asked: Asked) -> None:
    """Set what a server of a pair needs."""
    args, wanted = asked.args, asked.config
    has_several_ranks = asked.layout is not None and asked.layout.num_ranks > 1
    if role is Role.DECODE:
        # The linker belongs to a radix cache, and decode servers have none unless they are told.
        args.disaggregation_decode_enable_radix_cache = True
    is_placed_here = has_several_ranks and wanted.policy != config.SGLANG_POLICY
    if role is Role.PREFILL and is_placed_here and args.load_balance_method == config.AUTO_LOAD_BALANCE:
        # Else the room says which rank it has to be, and a request that is placed elsewhere fails.
        args.load_balance_method = "round_robin"
    for note in notes(role, has_store=bool(wanted.store), tp_size=args.tp_size):
        logger.warning("banyan: %s", note)
