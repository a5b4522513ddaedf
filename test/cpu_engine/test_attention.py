# SPDX-License-Identifier: Apache-2.0
"""banyan_cpu computes what torch_native computes, bit for bit in bf16: a hit and a miss must give the same tokens."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

from banyan_cpu_engine import ATTENTION_BACKEND, attention
from banyan_cpu_engine.attention import CpuAttention, refuse_other_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SLOTS = 9, 3, 64, 4096


@pytest.fixture
def tables():
    generator = torch.Generator().manual_seed(7)
    shape = (NUM_SLOTS, NUM_KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    req_to_token = torch.randperm(NUM_SLOTS, generator=generator).view(4, 1024).to(torch.int32)
    return keys, values, req_to_token, generator


def run(backend_class, name, **kwargs):
    backend = backend_class.__new__(backend_class)
    backend._masks, backend._drafts = {}, None
    output = torch.empty_like(kwargs["query"])
    getattr(backend_class, name)(backend, output=output, scaling=HEAD_DIM**-0.5, enable_gqa=True, **kwargs)
    return output


def test_extend_when_a_batch_is_filled_up_then_its_requests_are_as_without(tables):
    """Rows of no request: four of them behind one token, as SGLang fills up what a draft takes in."""
    keys, values, req_to_token, generator = tables
    query = torch.randn((8, NUM_HEADS, HEAD_DIM), generator=generator).bfloat16()
    common = {"k_cache": keys, "v_cache": values, "req_to_token": req_to_token, "causal": True}

    def extended(num_requests, seq_lens):
        return run(
            CpuAttention,
            "_run_sdpa_forward_extend",
            query=query[: 4 * num_requests],
            req_pool_indices=torch.arange(num_requests),
            seq_lens=torch.tensor(seq_lens),
            extend_prefix_lens=torch.tensor([36, 0][:num_requests]),
            extend_seq_lens=torch.tensor([4, 4][:num_requests]),
            **common,
        )

    filled = extended(2, [40, 1])
    assert torch.equal(filled[:4], extended(1, [40])) and not filled[4:].any()


def extended_rows(tables, *, drafts, slots, seq_lens, prefix_lens, new_lens):
    """Eight rows, more than the batch has."""
    keys, values, req_to_token, generator = tables
    query = torch.randn((8, NUM_HEADS, HEAD_DIM), generator=generator).bfloat16()
    backend = CpuAttention.__new__(CpuAttention)
    backend._masks, backend._drafts = {}, drafts
    return backend._run_sdpa_forward_extend(
        query=query,
        output=torch.full_like(query, torch.nan),
        k_cache=keys,
        v_cache=values,
        req_to_token=req_to_token,
        req_pool_indices=torch.tensor(slots),
        seq_lens=torch.tensor(seq_lens),
        extend_prefix_lens=torch.tensor(prefix_lens),
        extend_seq_lens=torch.tensor(new_lens),
        scaling=HEAD_DIM**-0.5,
        enable_gqa=True,
        causal=True,
    )


def test_extend_when_there_are_more_rows_than_tokens_then_the_others_are_numbers(tables):
    """Ranks in step compute a multiple of their shards."""
    output = extended_rows(tables, drafts=None, slots=[0], seq_lens=[47], prefix_lens=[40], new_lens=[7])
    assert output[:7].any(dim=-1).all() and not output[7:].any()


def test_drafts_when_there_are_more_rows_than_drafts_then_the_others_are_numbers(tables):
    """As above, of a batch that is verified."""
    drafts = torch.ones((2, 3, 3)).tril().bool()
    output = extended_rows(tables, drafts=drafts, slots=[0, 2], seq_lens=[40, 7], prefix_lens=[0, 0], new_lens=[3, 3])
    assert output[:6].any(dim=-1).all() and not output[6:].any()


@pytest.mark.parametrize("window", [None, 39, 600])
@pytest.mark.parametrize(
    "prefix_lens, new_lens",
    [
        ([0], [700]),
        ([1008], [16]),
        ([0, 512, 33], [5, 300, 1]),
        ([990], [1]),
        ([700], [33]),
        ([16], [684]),
        ([280], [420]),
    ],
)
def test_extend_when_a_prefix_is_cached_then_equals_torch_native(tables, prefix_lens, new_lens, window):
    keys, values, req_to_token, generator = tables
    arguments = {
        "query": torch.randn((sum(new_lens), NUM_HEADS, HEAD_DIM), generator=generator).bfloat16(),
        "k_cache": keys,
        "v_cache": values,
        "req_to_token": req_to_token,
        "req_pool_indices": torch.arange(len(new_lens)),
        "seq_lens": torch.tensor(prefix_lens) + torch.tensor(new_lens),
        "extend_prefix_lens": torch.tensor(prefix_lens),
        "extend_seq_lens": torch.tensor(new_lens),
        "causal": True,
        "sliding_window_size": window,
    }
    expected = run(TorchNativeAttnBackend, "_run_sdpa_forward_extend", **arguments)
    assert torch.equal(run(CpuAttention, "_run_sdpa_forward_extend", **arguments), expected)


@pytest.mark.parametrize("window", [None, 39, 600])
@pytest.mark.parametrize("total", [257, 258, 259, 769, 770, 513, 64, 33, 35, 610, 5])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 17, 35])
def test_extend_when_the_last_block_is_short_then_still_equals_torch_native(tables, total, new, window):
    if new < total:
        test_extend_when_a_prefix_is_cached_then_equals_torch_native(tables, [total - new], [new], window)


def test_extend_when_the_mask_is_asked_for_twice_then_it_is_built_once():
    backend = CpuAttention.__new__(CpuAttention)
    backend._masks = {}
    mask = backend._lower_right(2, 4, 5, None)
    assert mask.tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False]]
    assert backend._lower_right(2, 4, 5, None) is mask
    windowed = backend._lower_right(2, 4, 5, 1)
    assert windowed.tolist() == [[False, True, True, False, False], [False, False, True, True, False]]


@pytest.mark.parametrize(("value_dim", "is_copied"), [(HEAD_DIM, False), (HEAD_DIM // 2, True)])
def test_values_when_they_are_as_wide_as_keys_then_they_are_not_copied(value_dim, is_copied, monkeypatch):
    seen = []
    attend = attention.scaled_dot_product_attention

    def noting(query, key, value, **how):
        seen.append(value)
        return attend(query, key, value, **how)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noting)
    backend = CpuAttention.__new__(CpuAttention)
    query, keys = torch.zeros(8, NUM_HEADS, HEAD_DIM), torch.zeros(8, NUM_KV_HEADS, HEAD_DIM)
    values = torch.zeros(8, NUM_KV_HEADS, value_dim)
    backend._attend(query, keys, values, scaling=None, enable_gqa=True, window=None)
    assert [value.data_ptr() != values.data_ptr() for value in seen] == [is_copied]


def test_padding_when_the_kernels_of_amx_are_missing_then_padded_requests_are_as_long_as_with_them():
    ours, theirs = (backend.__new__(backend) for backend in (CpuAttention, IntelAMXAttnBackend))
    assert ours.get_cpu_graph_seq_len_fill_value() == theirs.get_cpu_graph_seq_len_fill_value() == 1


LATENT_DIM, ROPE_DIM, NUM_LATENT_HEADS = 32, 16, 4


def extend_over_latents(backend_class, latents, query, *, prefix_len):
    """Attention of the last queries of one request to its latents [tokens, 1, latent + rotary]."""
    backend = backend_class.__new__(backend_class)
    backend._masks, backend._drafts = {}, None
    num_new = query.shape[0] - prefix_len
    output = torch.empty(num_new, NUM_LATENT_HEADS, LATENT_DIM, dtype=query.dtype)
    return backend._run_sdpa_forward_extend(
        query[prefix_len:],
        output,
        latents,
        latents[..., :LATENT_DIM],
        torch.arange(query.shape[0], dtype=torch.int32).view(1, -1),
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([query.shape[0]]),
        torch.tensor([prefix_len]),
        torch.tensor([num_new]),
        scaling=0.1,
        enable_gqa=True,
        causal=True,
    )


@pytest.mark.parametrize("num_tokens", [5, 64, 300, 777])
@pytest.mark.parametrize("prefix_len", [0, 1, 16, 32, 288])
def test_latents_when_a_prefix_is_cached_then_rows_are_those_of_the_whole_prompt(num_tokens, prefix_len):
    if prefix_len >= num_tokens:
        prefix_len = num_tokens - 1
    generator = torch.Generator().manual_seed(num_tokens)
    latents = torch.randn(num_tokens, 1, LATENT_DIM + ROPE_DIM, generator=generator).bfloat16()
    query = torch.randn(num_tokens, NUM_LATENT_HEADS, LATENT_DIM + ROPE_DIM, generator=generator).bfloat16()
    whole = extend_over_latents(CpuAttention, latents, query, prefix_len=0)
    assert torch.equal(extend_over_latents(CpuAttention, latents, query, prefix_len=prefix_len), whole[prefix_len:])
    plain = extend_over_latents(TorchNativeAttnBackend, latents, query, prefix_len=0)
    assert torch.allclose(whole, plain, atol=0.02)


def test_latents_when_the_cache_holds_them_then_sglang_attends_in_the_form_that_reads_it(monkeypatch):
    monkeypatch.setattr(AttentionBackendRegistry, "_handlers", {})
    runner = {"device": "cpu", "req_to_token_pool": None}
    CpuAttention(SimpleNamespace(**runner, token_to_kv_pool=MHATokenToKVPool.__new__(MHATokenToKVPool)))
    assert AttentionBackendRegistry.get_handler(ATTENTION_BACKEND) is None
    CpuAttention(SimpleNamespace(**runner, token_to_kv_pool=MLATokenToKVPool.__new__(MLATokenToKVPool)))
    attend = AttentionBackendRegistry.get_handler(ATTENTION_BACKEND)
    for prefix_lens in ([0], [96]):
        batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, extend_prefix_lens_cpu=prefix_lens)
        assert attend(SimpleNamespace(), batch) is AttnForwardMethod.MLA


WINDOW, NUM_WINDOW_SLOTS = 39, 512
"""What SGLang calls a window of 40 tokens: a token sees 39 before it."""


class TwoPools:
    """The pool of the windows, and where the tokens of the others lie in it; SGLang's own pool tells the same."""

    def __init__(self, mapping):
        self.mapping = mapping
        self.layers_mapping = {0: (0, True), 1: (0, False)}

    def translate_loc_from_full_to_swa(self, slots):
        return self.mapping[slots]


class Windowed:
    """Two requests whose old tokens have left the pool of the windows. Whatever lies in slot 0 must not be seen."""

    def __init__(self, kv_lens, new_lens):
        generator = torch.Generator().manual_seed(sum(kv_lens))
        self.kv_lens, self.new_lens = kv_lens, new_lens
        self.req_to_token = torch.randperm(NUM_SLOTS, generator=generator).view(4, 1024).to(torch.int32)
        self.keys, self.values = (
            torch.randn((NUM_WINDOW_SLOTS, NUM_KV_HEADS, HEAD_DIM), generator=generator) for _ in range(2)
        )
        self.keys[0], self.values[0] = 50.0, 1e4
        mapping = torch.zeros(NUM_SLOTS + 1, dtype=torch.int64)
        free = torch.randperm(NUM_WINDOW_SLOTS - 1, generator=generator) + 1
        for row, (kv_len, new_len) in enumerate(zip(kv_lens, new_lens, strict=True)):
            first = max(0, kv_len - new_len - WINDOW)
            slots = self.req_to_token[row, first:kv_len].long()
            mapping[slots], free = free[: len(slots)], free[len(slots) :]
        self.query = torch.randn((sum(new_lens), NUM_HEADS, HEAD_DIM), generator=generator)
        self.backend = CpuAttention.__new__(CpuAttention)
        self.backend._masks, self.backend._drafts = {}, None
        self.backend.use_sliding_window_kv_pool, self.backend.token_to_kv_pool = True, TwoPools(mapping)
        self.mapping = mapping

    def attend(self, name, *lens):
        output = torch.empty_like(self.query)
        self.backend._is_windowed = self.backend._has_own_pages(SimpleNamespace(layer_id=0))
        getattr(self.backend, name)(
            self.query,
            output,
            self.keys,
            self.values,
            self.req_to_token,
            torch.arange(len(self.kv_lens)),
            torch.tensor(self.kv_lens),
            *lens,
            scaling=HEAD_DIM**-0.5,
            enable_gqa=True,
            causal=True,
            sliding_window_size=WINDOW,
        )
        return output

    def expected(self):
        """One query at a time over the tokens that it sees, nothing else."""
        rows, number = [], 0
        for row, (kv_len, new_len) in enumerate(zip(self.kv_lens, self.new_lens, strict=True)):
            for place in range(kv_len - new_len, kv_len):
                seen = self.mapping[self.req_to_token[row, max(0, place - WINDOW) : place + 1].long()]
                keys, values = (
                    cache[seen].repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1)
                    for cache in (self.keys, self.values)
                )
                scores = torch.einsum("hd,thd->ht", self.query[number], keys) * HEAD_DIM**-0.5
                rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
                number += 1
        return torch.stack(rows)


@pytest.mark.parametrize("kv_lens, new_lens", [([100, 60], [100, 7]), ([700, 41], [20, 1]), ([39], [39]), ([900], [3])])
def test_window_when_a_prompt_is_extended_then_each_token_sees_the_tokens_of_its_window(kv_lens, new_lens):
    asked = Windowed(kv_lens, new_lens)
    lens = torch.tensor(kv_lens) - torch.tensor(new_lens), torch.tensor(new_lens)
    assert torch.allclose(asked.attend("_run_sdpa_forward_extend", *lens), asked.expected(), atol=1e-4)


def test_window_when_a_prefix_is_cached_then_no_mask_is_as_high_as_the_context_is_long():
    """A mask of context x context fills the memory of the machine."""
    asked = Windowed([900], [3])
    asked.attend("_run_sdpa_forward_extend", torch.tensor([897]), torch.tensor([3]))
    assert [mask.shape for mask in asked.backend._masks.values()] == [(4, 900)]


@pytest.mark.parametrize("kv_lens", [[100, 60], [1000, 1], [40]])
def test_window_when_a_token_is_decoded_then_it_sees_the_tokens_of_its_window(kv_lens):
    asked = Windowed(kv_lens, [1] * len(kv_lens))
    assert torch.allclose(asked.attend("_run_sdpa_forward_decode"), asked.expected(), atol=1e-4)


def test_window_when_several_layers_ask_then_slots_are_translated_once_and_other_layers_are_left_alone():
    asked = Windowed([60], [1])
    asked.attend("_run_sdpa_forward_decode")
    slots = asked.backend._window_slots
    asked.attend("_run_sdpa_forward_decode")
    assert asked.backend._window_slots is slots
    assert not asked.backend._has_own_pages(SimpleNamespace(layer_id=1))


@pytest.mark.parametrize("known", [10, 60])
def test_window_when_drafts_are_verified_then_each_sees_its_window_of_the_known_tokens_and_the_drafts(known):
    """A chain of three drafts, as if they had been a prompt's last tokens."""
    asked = Windowed([known + 3], [3])
    asked.kv_lens = [known]
    asked.backend._drafts = torch.ones((1, 3, 3)).tril().bool()
    lens = torch.tensor([0]), torch.tensor([3])
    verified = asked.attend("_run_sdpa_forward_extend", *lens)
    asked.kv_lens = [known + 3]
    assert torch.allclose(verified, asked.expected(), atol=1e-4)


def test_window_when_sglang_fills_up_the_drafts_of_a_rank_then_nobody_is_computed_for_them():
    """Ranks in step: rows of no request, more than the tokens that they stand behind."""
    asked = Windowed([60, 1], [7, 4])
    asked.query = asked.query[:11]
    lens = torch.tensor([53, 0]), torch.tensor([7, 4])
    attended = asked.attend("_run_sdpa_forward_extend", *lens)
    assert not attended[7:].any() and attended[:7].any(dim=-1).all()


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ({"logit_cap": 50.0}, "caps its scores"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "attends to what comes later"),
        ({"attn_type": AttentionType.ENCODER_ONLY, "sliding_window_size": 9}, "attends within a window on both sides"),
        ({"use_irope": True}, "attends within chunks of its prompt"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, None),
        ({"sliding_window_size": 9}, None),
        ({}, None),
    ],
)
def test_model_when_a_layer_asks_for_more_than_torchs_attention_has_then_it_is_refused(asks, said, capsys):
    model = torch.nn.Sequential(torch.nn.Identity(), RadixAttention(9, 64, 0.125, 3, layer_id=5, **asks))
    if said is None:
        refuse_other_attention(model)
        return
    with pytest.raises(SystemExit):
        refuse_other_attention(model)
    assert f"layer 5 of this model {said}" in capsys.readouterr().err


def test_model_when_it_scales_its_scores_by_place_then_it_is_refused(capsys):
    layer = RadixAttention(9, 64, 0.125, 3, layer_id=0)
    layer.xai_temperature_len = 1024
    with pytest.raises(SystemExit):
        refuse_other_attention(torch.nn.Sequential(layer))
    assert "by place" in capsys.readouterr().err
