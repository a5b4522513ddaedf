# SPDX-License-Identifier: Apache-2.0
"""Why a server cannot deal with other nodes, or with the other servers of its pair: one line for each reason."""

from __future__ import annotations

from pathlib import Path

from banyan.feature import Asked
from banyan.owner import read_secret
from banyan.refusals import nixl_refusal, page_server_slots_refusal, secret_refusal, spread_rank_refusal
from banyan.transport import nixl


def refusals(asked: Asked) -> list[str]:
    wanted, layout = asked.config, asked.layout
    if not wanted.secret_file or asked.model is not None:
        return []
    reasons = []
    if wanted.deals_with_nodes and wanted.nixl_plugin and not nixl.is_installed():
        reasons.append(nixl_refusal(carrier=wanted.carrier, way_out=nixl.WAY_OUT))
    try:
        read_secret(Path(wanted.secret_file))
    except (OSError, ValueError) as error:
        reasons.append(secret_refusal(path=wanted.secret_file, error=error))
    if layout is not None and layout.num_member_slots < layout.num_shards and wanted.deals_with_nodes:
        reasons.append(spread_rank_refusal(num_nodes=layout.num_nodes))
    if wanted.listen and layout is not None:
        line = page_server_slots_refusal(num_slots=layout.num_slots(has_arena=True), num_shards=layout.num_shards)
        reasons += [] if line is None else [line]
    return reasons
