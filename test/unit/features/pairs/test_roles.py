# SPDX-License-Identifier: Apache-2.0
"""What each server of a pair does, inherits and says."""

import pytest

from banyan.features.pairs.roles import DEFERRED_RELEASE_S, Role, environment, notes

RELEASE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"


def test_role_when_it_is_alone_then_nothing_is_inherited_or_said():
    assert not Role.ALONE.is_paired and Role.ALONE.reads_ahead and not Role.ALONE.keeps_answers_only
    assert environment(Role.ALONE, on_gpu=False) == {}
    assert notes(Role.ALONE, has_store=False, tp_size=1) == []


def test_role_when_it_decodes_then_it_reads_nothing_and_keeps_what_is_behind_prompts():
    assert Role.DECODE.keeps_answers_only and not Role.DECODE.reads_ahead and not Role.DECODE.learns_from_others
    assert Role.PREFILL.reads_ahead and Role.PREFILL.learns_from_others and not Role.PREFILL.keeps_answers_only


def test_environment_when_pages_may_be_written_late_then_a_decode_server_holds_them_longer():
    assert environment(Role.DECODE, on_gpu=True) == {RELEASE: str(DEFERRED_RELEASE_S)}
    assert RELEASE not in environment(Role.PREFILL, on_gpu=True)


def test_environment_when_senders_do_not_wait_for_the_forward_then_nothing_is_sent_early():
    assert environment(Role.PREFILL, on_gpu=True, transfer="nixl")[EARLY_SEND] == "0"
    assert EARLY_SEND not in environment(Role.PREFILL, on_gpu=True, transfer="mooncake")
    assert EARLY_SEND not in environment(Role.DECODE, on_gpu=True, transfer="nixl")


def test_environment_when_there_is_no_gpu_then_no_early_send_and_one_thread():
    variables = environment(Role.PREFILL, on_gpu=False)
    assert variables[EARLY_SEND] == "0"
    assert variables["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] == '{"num_threads": "1"}'
    assert environment(Role.DECODE, on_gpu=False)[EARLY_SEND] == "0"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("names", [("UCX_IB_TRAFFIC_CLASS", "UCX_IB_SL"), ("MC_IB_TC", "MC_IB_SL")])
def test_environment_when_the_hand_over_has_a_class_then_what_carries_it_is_told(role, names):
    variables = environment(role, on_gpu=True, dscp=8, ib_service_level=3)
    assert [variables[name] for name in names] == ["32", "3"]
    assert not set(names) & set(environment(role, on_gpu=True))
    assert environment(Role.ALONE, on_gpu=True, dscp=8, ib_service_level=3) == {}


@pytest.mark.parametrize(("role", "said"), [(Role.DECODE, "not kept"), (Role.PREFILL, "computed again")])
def test_notes_when_a_pair_has_no_store_then_one_line_says_what_is_lost(role, said):
    (line,) = notes(role, has_store=False, tp_size=1)
    assert "--banyan-store" in line and said in line


def test_notes_when_there_is_a_store_then_one_line_says_with_whom_it_shares():
    (line,) = notes(Role.PREFILL, has_store=True, tp_size=2)
    assert "same weights" in line and line.endswith("--tp-size 2")
