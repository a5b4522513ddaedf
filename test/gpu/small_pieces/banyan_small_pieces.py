# SPDX-License-Identifier: Apache-2.0
"""A plugin of SGLang that has the host arena pinned in small pieces, so that a tiny model's pages lie in several.

Only for checks: a server's pieces hold more than such a model computes.
"""

PIECE_BYTES = 2 << 20


def register():
    from banyan.sglang_plugin.rank import arena_memory
    from banyan.transport.cuda_ipc import host_pieces

    host_pieces.PIECE_BYTES = arena_memory.PIECE_BYTES = PIECE_BYTES
