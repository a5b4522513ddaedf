# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan_lab.sim.compute import PrefillModel, deepseek_rates, kv_room_bytes
from banyan_lab.sim.hardware import gpu, table
from banyan_lab.sim.llms import cache_compute_ratio, llm
from banyan_lab.sim.systems import deployment


@pytest.mark.parametrize(
    ("name", "low", "high", "within"),
    [
        ("qwen2-5-32b", 117, 267, 0.02),
        ("gpt-oss-120b", 47, 95, 0.02),
        ("qwen3-235b-a22b", 39, 60, 0.02),
        ("deepseek-v3-2", 13, 36, 0.07),
        ("deepseek-v3", 4.8, 5.8, 0.12),
    ],
)
def test_cache_compute_ratio_when_16k_to_64k_then_published(name, low, high, within):
    """DualPath's table, at its append of 429 tokens."""
    ratios = [cache_compute_ratio(llm(name), context_tokens=context, append_tokens=429) for context in (16_384, 65_536)]
    assert ratios == pytest.approx([low, high], rel=within)


def test_rates_when_put_back_then_the_production_system_they_came_from():
    """14.8k tokens/s of a node at 21 tokens/s of a request are what the decode model gives for that batch."""
    rates, seen = deepseek_rates(), table("engines")["deepseek"]
    assert 0.1 < rates.prefill_flops_per_s / gpu("H800").fp8_flops_per_s < 0.3
    model, batch = llm("deepseek-v3"), 14_800 / 8 / 21
    kv_bytes = batch * seen["mean_context_tokens"] * 1152 * 61
    step_s = (
        rates.decode_layer_s * 61
        + (model.weight_bytes_on(144) + kv_bytes) / gpu("H800").hbm_bytes_per_s
        + batch * model.linear_flops_per_token / rates.prefill_flops_per_s
    )
    assert step_s == pytest.approx(1 / 21)


def test_attention_when_all_tokens_are_attended_then_quadratic_and_with_topk_linear():
    dense, sparse = (PrefillModel(llm(name), 1e15) for name in ("deepseek-v3", "deepseek-v3-2"))

    def growth(cost):
        return cost.attention_s(new_tokens=100, cached_tokens=80_000) / cost.attention_s(
            new_tokens=100, cached_tokens=20_000
        )

    assert growth(dense) == pytest.approx(4.0, rel=0.01)
    assert 1.0 < growth(sparse) < 2.5


def test_decode_step_when_batch_or_context_grow_then_longer():
    decode = deployment("deepseek-v3-2", prefill_nodes=2, decode_nodes=4).decode
    steps = [
        decode.step_s(num_requests=n, context_tokens=n * context) for n in (0, 1, 8, 64) for context in (1_000, 60_000)
    ]
    assert steps == sorted(steps) and steps[-1] > 1.5 * steps[1]


def test_room_when_the_model_does_not_fit_then_refused():
    with pytest.raises(ValueError, match="does not fit"):
        kv_room_bytes(llm("deepseek-v3"), gpu("H800"), num_gpus=8)
