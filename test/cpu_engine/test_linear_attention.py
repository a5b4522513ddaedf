# SPDX-License-Identifier: Apache-2.0
"""Linear attention on the CPU engine: the operators that stand in for SGLang's, against the library transformers."""

from types import SimpleNamespace

import pytest
import sgl_kernel.mamba as kernels
import torch
from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
from test.sglang_plugin.rank import hooked as plain
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from banyan_cpu_engine import linear_attention, seam, server

NORM = "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward"
KEPT = "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._track_mamba_state_decode"
GATE = "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add"
TOKENS, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, SLOT = 150, 2, 4, 16, 8, 2


@pytest.fixture(autouse=True)
def _cpu_engine(monkeypatch):
    monkeypatch.setattr(server, "is_on", lambda: True)
    torch.manual_seed(0)


def hooked(target, original):
    return plain.hooked(target, original, seam.HOOKS.queue)


def never(*args, **kwargs):
    raise AssertionError("SGLang's kernel needs a GPU")


def sequence(num_tokens=TOKENS):
    q, k = (torch.randn(1, num_tokens, KEY_HEADS, KEY_DIM) for _ in range(2))
    v = torch.randn(1, num_tokens, VALUE_HEADS, VALUE_DIM)
    return q, k, v, torch.randn(num_tokens, VALUE_HEADS), torch.randn(num_tokens, VALUE_HEADS)


def states():
    return torch.randn(3, VALUE_HEADS, VALUE_DIM, KEY_DIM)


def gates():
    return torch.rand(VALUE_HEADS) - 3, torch.ones(VALUE_HEADS)


def extended(q, k, v, g, beta, kept, spans=(0, TOKENS), slots=(SLOT,)):
    return kernels.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, initial_state=kept, initial_state_indices=torch.tensor(slots), cu_seqlens=torch.tensor(spans)
    )


def test_rule_when_a_sequence_goes_on_from_a_state_then_it_is_that_of_transformers():
    q, k, v, a, b = sequence()
    kept = states()
    decay, bias = gates()
    g, beta = kernels.fused_gdn_gating_cpu(decay, a, b, bias)
    assert torch.allclose(g[0], -decay.exp() * torch.nn.functional.softplus(a + bias))
    wide_q, wide_k = (part.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2) for part in (q, k))
    said, last = torch_chunk_gated_delta_rule(
        wide_q,
        wide_k,
        v,
        g=g,
        beta=beta,
        initial_state=kept[SLOT : SLOT + 1].transpose(2, 3).contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    others = kept[:SLOT].clone()
    ours, _, chunks = extended(q, k, v, g, beta, kept)
    assert torch.allclose(ours, said, atol=1e-5) and torch.allclose(kept[SLOT], last[0].transpose(1, 2), atol=1e-5)
    assert torch.equal(kept[:SLOT], others) and chunks.shape[1] == 3


def test_rule_when_a_sequence_is_cut_anywhere_then_no_bit_changes():
    q, k, v, a, b = sequence()
    decay, bias = gates()
    g, beta = kernels.fused_gdn_gating_cpu(decay, a, b, bias)
    whole, cut = (states(),) * 2
    cut = whole.clone()
    said, _, chunks = extended(q, k, v, g, beta, whole)
    for start, end in ((0, 64), (64, 67), (67, TOKENS - 1)):
        part = [tensor[:, start:end] for tensor in (q, k, v, g, beta)]
        told, _, _ = extended(*part, cut, spans=(0, end - start))
        assert torch.equal(told, said[:, start:end])
        if end == 64:
            assert torch.equal(cut[SLOT], chunks[0, 1])
    token = [tensor[:, -1:] for tensor in (q, k, v)]
    told = kernels.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=decay,
        dt_bias=bias,
        q=token[0],
        k=token[1],
        v=token[2],
        a=a[-1:],
        b=b[-1:],
        initial_state_source=cut,
        initial_state_indices=torch.tensor([SLOT]),
        cu_seqlens=torch.tensor([0, 1]),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
    )
    assert torch.equal(told, said[:, -1:]) and torch.equal(cut[SLOT], whole[SLOT])


def test_rule_when_keys_come_in_another_form_then_it_says_so():
    with pytest.raises(NotImplementedError, match="normalises"):
        kernels.chunk_gated_delta_rule_cpu(
            *sequence(1),
            initial_state=states(),
            initial_state_indices=torch.tensor([0]),
            cu_seqlens=torch.tensor([0, 1]),
            use_qk_l2norm_in_kernel=False,
        )


@pytest.mark.parametrize("softplus", [(2.0, 20.0), (1.0, 10.0)])
def test_rule_when_its_softplus_is_another_then_it_says_so(softplus):
    q, k, v, a, b = sequence(1)
    decay, bias = gates()
    with pytest.raises(NotImplementedError, match="softplus"):
        kernels.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=decay,
            dt_bias=bias,
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            initial_state_source=states(),
            initial_state_indices=torch.tensor([SLOT]),
            cu_seqlens=torch.tensor([0, 1]),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=softplus[0],
            softplus_threshold=softplus[1],
        )


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "with a bias"])
@pytest.mark.parametrize("seed", range(20))
def test_convolution_when_a_sequence_is_cut_then_it_is_that_of_transformers_and_no_bit_changes(seed, has_bias):
    torch.manual_seed(seed)
    x, weight = torch.randn(6, 20), torch.randn(6, 4)
    bias = torch.randn(6) if has_bias else None
    kept, cut = torch.randn(3, 6, 3), None
    cut = kept.clone()
    inputs = torch.cat((kept[SLOT], x), dim=1).unsqueeze(0)
    theirs = causal_conv1d_fn(inputs, weight, bias, activation="silu")[0, :, -20:]

    def extend(part, kept, has_state):
        return kernels.causal_conv1d_fn_cpu(
            part,
            weight,
            bias,
            activation="silu",
            conv_states=kept,
            has_initial_state=torch.tensor([has_state]),
            cache_indices=torch.tensor([SLOT]),
            query_start_loc=torch.tensor([0, part.shape[1]]),
        )

    whole = extend(x, kept, True)
    assert torch.allclose(whole, theirs, atol=1e-6) and torch.equal(kept[SLOT], x[:, -3:])
    assert torch.equal(extend(x[:, :18], cut, True), whole[:, :18])
    for token in (18, 19):
        told = kernels.causal_conv1d_update_cpu(
            x[:, token].unsqueeze(0), cut, weight, bias, "silu", conv_state_indices=torch.tensor([SLOT])
        )
        assert torch.equal(told[0], whole[:, token])
    assert torch.equal(cut, kept)
    assert not torch.equal(extend(x[:, :2], cut, False), whole[:, :2])


def test_norm_when_it_has_a_gate_then_it_is_that_of_transformers():
    theirs = Qwen3NextRMSNormGated(VALUE_DIM, eps=1e-5)
    ours = FusedRMSNormGated(VALUE_DIM, eps=1e-5, activation="silu", device="cpu", dtype=torch.float32)
    x, gate = torch.randn(5, VALUE_DIM), torch.randn(5, VALUE_DIM)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(VALUE_DIM))
        ours.weight.copy_(theirs.weight)
        assert torch.allclose(hooked(NORM, never)(ours, x, gate), theirs(x, gate), atol=1e-6)


def test_gate_when_a_shared_expert_has_spoken_then_its_part_is_added():
    hidden, weight, shared, said = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8), torch.randn(3, 8)
    expected = said + torch.sigmoid(hidden @ weight).unsqueeze(1) * shared
    hooked(GATE, never)(hidden, weight, shared, said)
    assert torch.allclose(said, expected, atol=1e-6)


def test_states_when_a_request_comes_to_a_place_while_it_decodes_then_they_are_copied_to_its_other_slot():
    conv, recurrent = torch.randn(6, 2, 3), torch.randn(6, 2, 2)
    before = conv.clone(), recurrent.clone()
    batch = SimpleNamespace(mamba_track_mask=torch.tensor([False, True]), batch_size=2)
    backend = SimpleNamespace(forward_metadata=SimpleNamespace(mamba_track_indices=torch.tensor([3, 4])))
    hooked(KEPT, never)(backend, batch, conv, recurrent, torch.tensor([1, 2], dtype=torch.int32), 0)
    for now, then in zip((conv, recurrent), before, strict=True):
        assert torch.equal(now[4], then[2])
        assert torch.equal(now[[0, 1, 2, 3, 5]], then[[0, 1, 2, 3, 5]])
    batch.mamba_track_mask = None
    hooked(KEPT, never)(backend, batch, conv, recurrent, torch.tensor([1, 2]), 0)


@pytest.mark.parametrize("has_driver", [False, True])
def test_model_when_it_is_loaded_then_torch_names_the_cpu_and_afterwards_what_it_named_before(monkeypatch, has_driver):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_driver)
    monkeypatch.setattr(linear_attention, "mambaish_config", lambda config: config)
    runner, plain = SimpleNamespace(model_config="with states"), SimpleNamespace(model_config=None)
    named, seen = torch.get_device_module, []
    linear_attention.around_load_model(lambda runner: seen.append(torch.get_device_module()), runner)
    assert seen == [torch.cpu] and torch.get_device_module is named
    with pytest.raises(ZeroDivisionError):
        linear_attention.around_load_model(lambda runner: 1 / 0, runner)
    assert torch.get_device_module is named
    linear_attention.around_load_model(lambda runner: seen.append(torch.get_device_module), plain)
    assert seen[1:] == [named]


def test_hooks_when_the_engine_is_off_then_sglangs_own_are_called(monkeypatch):
    monkeypatch.setattr(server, "is_on", lambda: False)
    asked = []
    for target, args in ((NORM, (None, 1, 2)), (KEPT, (None, None, 1, 2, 3)), (GATE, (1, 2, 3, 4))):
        hooked(target, lambda *given: asked.append(given))(*args)
    assert len(asked) == 3
