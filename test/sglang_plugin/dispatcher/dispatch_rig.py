# SPDX-License-Identifier: Apache-2.0
"""Dispatched requests, and a placer over two ranks in one process, with SGLang's own messages and hashes."""

from array import array

import msgspec
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams

from banyan.layout import Layout
from banyan.sglang_plugin.dispatcher.placement import Placer
from banyan.sglang_plugin.dispatcher.prefix_probe import PrefixProbe

PAGE = 16


def request(ids, *, rid="r", **extra):
    """A dispatched request; what SGLang requires beside the prompt is left empty."""
    required = {field.name: None for field in msgspec.structs.fields(TokenizedGenerateReqInput) if field.required}
    fields = {**required, "rid": rid, "input_ids": array("q", ids), "sampling_params": SamplingParams(), **extra}
    return TokenizedGenerateReqInput(**fields)


def page_keys(ids, *, page_tokens=PAGE, **extra):
    return get_storage_hash_str(RadixKey(array("q", ids), **extra).page_aligned(page_tokens), page_size=page_tokens)


def probe_of(rank_table, *, num_ranks=2, fetches=True, tokens_ahead=0, page_tokens=PAGE, layout=None):
    rank_table.agree_on_page_tokens(page_tokens)
    layout = layout or Layout(dp=num_ranks, attn_dp=1, attn_cp=1, attn_tp=1)
    return PrefixProbe(rank_table, layout=layout, fetches=fetches, tokens_ahead=tokens_ahead)


def placer_of(rank_table, *, dispatcher, snapshots=(), layout=None):
    return Placer(
        probe_of(rank_table, layout=layout),
        dispatcher,
        policy_name="lmetric",
        read_snapshots=lambda: list(snapshots),
    )
