# SPDX-License-Identifier: Apache-2.0
"""Every combination that Banyan refuses: one line, naming the flag and the way out."""

from dataclasses import fields

import pytest

from banyan import SGLANG_VERSION
from banyan.config import Config
from banyan.refusals import (
    NOT_OF_FILES,
    ServerFacts,
    arena_room_refusal,
    layout_refusal,
    page_server_slots_refusal,
    pool_refusal,
    refusals,
    secret_refusal,
)
from banyan.refusals.speculation import (
    IN_PAGES_OF_ONE,
    SHARED,
    DraftFacts,
    branches_refusal,
    draft_division_refusal,
    draft_refusals,
)

BAD = {
    "sglang_version": ("0.5.24", "sglang 0.5.24", "install sglang==0.5.23"),
    "device": ("xpu", "--device xpu", "--banyan-share off"),
    "num_member_slots": (65, "--dp-size, --tp-size", "use fewer"),
    "pp_size": (2, "--pp-size 2", "--pp-size 1"),
    "page_size": (1, "--page-size 1", "--page-size 16"),
    "disable_radix_cache": (True, "--disable-radix-cache", "drop that flag"),
    "radix_cache_backend": ("lmc", "--radix-cache-backend lmc", "drop that flag"),
    "enable_hierarchical_cache": (True, "--enable-hierarchical-cache", "use one of them"),
    "hicache_storage_backend": ("file", "--hicache-storage-backend", "use one of them"),
    "enable_lmcache": (True, "--enable-lmcache", "use one of them"),
    "enable_flexkv": (True, "--enable-flexkv", "use one of them"),
    "external_linker_backend": ("mooncake", "--unified-cache-external-linker-backend mooncake", "drop that flag"),
    "enable_unified_memory": (True, "--enable-unified-memory", "drop that flag"),
    "draft": (DraftFacts(algorithm="DFLASH"), "--speculative-algorithm DFLASH", "drop that flag"),
    "kv_cache_dtype": ("fp4_e2m1", "--kv-cache-dtype fp4_e2m1", "use auto"),
    "rust_server": (True, "SGLANG_RUST_SERVER", "unset it"),
    "rust_servicer": (True, "--servicer-impl rust", "use --servicer-impl python"),
}


@pytest.mark.parametrize("version", [SGLANG_VERSION, f"{SGLANG_VERSION}+cu130"])
def test_refusals_when_the_server_can_share_then_there_are_none(version):
    assert refusals(ServerFacts(sglang_version=version)) == []


@pytest.mark.parametrize("field", BAD)
def test_refusals_when_one_fact_is_bad_then_one_line_names_flag_and_way_out(field):
    value, flag, way_out = BAD[field]
    (line,) = refusals(ServerFacts(**{field: value}))
    assert flag in line and way_out in line
    assert "\n" not in line


def test_refusals_when_segments_are_expandable_then_only_cuda_minds():
    assert refusals(ServerFacts(expandable_segments=True)) == []
    lines = refusals(ServerFacts(device="cuda", expandable_segments=True))
    assert any("expandable_segments" in line and "unset it" in line for line in lines)
    assert refusals(ServerFacts(device="cuda", expandable_segments=True, has_arena=True)) == []


def test_refusals_when_a_gpu_gives_memory_back_then_pages_need_an_arena():
    assert refusals(ServerFacts(enable_memory_saver=True)) == []
    assert refusals(ServerFacts(device="cuda", enable_memory_saver=True, has_arena=True)) == []
    (line,) = refusals(ServerFacts(device="cuda", enable_memory_saver=True))
    assert "--enable-memory-saver" in line and "--banyan-host-gb" in line


@pytest.mark.parametrize("attention", IN_PAGES_OF_ONE)
def test_drafts_when_windows_are_verified_in_pages_of_one_token_only_then_branches_are_refused_in_others(attention):
    line = branches_refusal(num_branches=4, attention=attention, page_tokens=16)
    assert f"--attention-backend {attention}" in line and "use --speculative-eagle-topk 1" in line
    others = [{"num_branches": 1}, {"attention": "triton"}, {"attention": None}, {"page_tokens": 1}]
    bad = {"num_branches": 4, "attention": attention, "page_tokens": 16}
    assert [branches_refusal(**{**bad, **other}) for other in others] == [None] * 4


@pytest.mark.parametrize("load_format", NOT_OF_FILES)
def test_refusals_when_weights_are_not_those_of_the_checkpoint_then_pages_that_must_know_them_are_refused(load_format):
    assert refusals(ServerFacts(load_format=load_format)) == []
    assert refusals(ServerFacts(load_format="safetensors", knows_weights=True)) == []
    (line,) = refusals(ServerFacts(load_format=load_format, knows_weights=True))
    assert f"--load-format {load_format}" in line and "--load-format auto" in line


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        *(({"speculative_draft_load_format": one}, f"--speculative-draft-load-format {one}") for one in NOT_OF_FILES),
        ({"weight_cache_mode": "client"}, "--weight-cache-mode client"),
        ({"weight_cache_mode": "daemon"}, "--weight-cache-mode daemon"),
        ({"modelopt_checkpoint_restore_path": "/m"}, "--modelopt-checkpoint-restore-path /m"),
        ({"kt_weight_path": "/k"}, "--kt-weight-path /k"),
        ({"kt_weight_path": "/load-format/k"}, "--kt-weight-path /load-format/k"),
    ],
)
def test_refusals_when_weights_come_from_beside_the_files_then_pages_that_must_know_them_are_refused(asked, flag):
    assert refusals(ServerFacts(**asked)) == []
    (line,) = refusals(ServerFacts(**asked, knows_weights=True))
    assert line.startswith(f"{flag} with --banyan-store") and "drop that flag" in line


def test_refusals_when_two_flags_bring_other_weights_then_each_is_said_with_its_way_out():
    lines = refusals(ServerFacts(load_format="dummy", weight_cache_mode="client", knows_weights=True))
    ways_out = ("use --load-format auto, or drop those", "drop that flag, or drop those")
    assert len(lines) == 2 and all(way_out in line for line, way_out in zip(lines, ways_out, strict=True))


def test_refusals_when_the_pool_is_sized_after_capture_then_only_cuda_minds():
    assert refusals(ServerFacts(sizes_pool_after_capture=True)) == []
    (line,) = refusals(ServerFacts(device="cuda", sizes_pool_after_capture=True, has_arena=True))
    assert "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING" in line and "set it to 0" in line


def test_refusals_when_each_process_has_a_part_of_an_arena_then_it_takes_two_slots():
    assert (
        refusals(ServerFacts(num_member_slots=64)) == refusals(ServerFacts(num_member_slots=32, has_arena=True)) == []
    )
    (line,) = refusals(ServerFacts(num_member_slots=33, has_arena=True))
    assert "--banyan-host-gb" in line and "66 member slots" in line and "no host arena" in line


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"enable_hierarchical_cache": True}, "Banyan has its host arena, on by default"),
        (
            {"enable_hierarchical_cache": True, "hicache_size": 40, "num_member_slots": 8},
            "Banyan has --banyan-host-gb 320",
        ),
        ({"hicache_storage_backend": "mooncake"}, "--banyan-store mooncake://HOST:PORT --banyan-store-gb GB"),
        ({"hicache_storage_backend": "aibrix"}, "no store like aibrix"),
    ],
)
def test_refusal_when_hicache_is_asked_for_then_the_flags_that_take_its_place_are_named(asked, words):
    (line,) = refusals(ServerFacts(**asked))
    assert line.endswith(words)


def test_refusals_when_the_device_is_a_gpu_then_there_are_none():
    assert refusals(ServerFacts(device="cuda")) == []


def test_refusals_when_several_facts_are_bad_then_all_are_said_at_once():
    assert len(refusals(ServerFacts(pp_size=2, page_size=1, enable_lmcache=True))) == 3


def test_facts_when_a_field_is_added_then_it_has_a_refusal_here():
    covered = {*BAD, *BAD_PAIR, *BAD_DECODE, "expandable_segments", "sizes_pool_after_capture", "has_arena"}
    covered |= {"enable_memory_saver", "load_format", "speculative_draft_load_format", "knows_weights"}
    covered |= {"weight_cache_mode", "modelopt_checkpoint_restore_path", "kt_weight_path"}
    covered |= {"hicache_size", "disaggregation_mode", "load_balance_method", "policy", "num_ranks", "sends_early"}
    assert {field.name for field in fields(ServerFacts)} == covered


def test_refusal_when_processes_are_divided_in_another_way_then_both_ways_are_named():
    line = layout_refusal(asked="2 ranks of 4", resolved="8 ranks of 1")
    assert "2 ranks of 4" in line and "8 ranks of 1" in line and "--banyan-share off" in line


def test_pool_refusal_when_the_pool_is_unknown_then_it_is_named():
    line = pool_refusal(pool_class="DSATokenToKVPool", supported=("MHA", "MLA"))
    assert "DSATokenToKVPool" in line and "--banyan-share off" in line


BAD_PAIR = {
    "disaggregation_transfer_backend": ("mori", "--disaggregation-transfer-backend mori", "backend nixl"),
    "enable_pd_role_switch": (True, "--enable-pd-role-switch", "drop that flag"),
    "store_admit": ("second", "--banyan-store-admit second", "use first"),
}
BAD_DECODE = {
    "disaggregation_decode_allocation_policy": (
        "prefill_complete",
        "--disaggregation-decode-allocation-policy prefill_complete",
        "policy early on both servers",
    ),
    "disaggregation_decode_retraction_backup": (
        "host_pool",
        "--disaggregation-decode-retraction-backup host_pool",
        "drop those flags",
    ),
    "disaggregation_decode_host_receive_threshold": (
        0.5,
        "--disaggregation-decode-host-receive-threshold",
        "drop those flags",
    ),
    "disaggregation_decode_enable_offload_kvcache": (
        True,
        "--disaggregation-decode-enable-offload-kvcache",
        "use one of them",
    ),
    "enable_hisparse": (True, "--enable-hisparse", "drop that flag"),
}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_refusals_when_the_server_is_one_of_a_pair_then_there_are_none(engine, mode):
    assert refusals(ServerFacts(disaggregation_mode=mode, disaggregation_transfer_backend=engine)) == []


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("field", BAD_PAIR)
def test_refusals_when_a_pair_cannot_work_then_one_line_names_flag_and_way_out(field, mode):
    value, flag, way_out = BAD_PAIR[field]
    (line,) = refusals(ServerFacts(disaggregation_mode=mode, **{field: value}))
    assert flag in line and way_out in line
    assert refusals(ServerFacts(**{field: value})) == []


@pytest.mark.parametrize("field", BAD_DECODE)
def test_refusals_when_a_decode_server_cannot_keep_answers_then_one_line_and_only_there(field):
    value, flag, way_out = BAD_DECODE[field]
    (line,) = refusals(ServerFacts(disaggregation_mode="decode", **{field: value}))
    assert flag in line and way_out in line
    assert refusals(ServerFacts(disaggregation_mode="prefill", **{field: value})) == []


def test_refusals_when_room_and_policy_both_choose_the_rank_then_one_line():
    facts = {"disaggregation_mode": "prefill", "load_balance_method": "follow_bootstrap_room", "policy": "lmetric"}
    (line,) = refusals(ServerFacts(**facts))
    assert "follow_bootstrap_room" in line and "--banyan-policy lmetric" in line
    assert refusals(ServerFacts(**facts | {"num_ranks": 1})) == []
    assert refusals(ServerFacts(**facts | {"policy": "sglang"})) == []


def test_refusals_when_a_prefix_would_be_sent_before_it_is_written_then_one_line_where_senders_do_not_wait():
    facts = {"disaggregation_mode": "prefill", "sends_early": True, "device": "cuda"}
    (line,) = refusals(ServerFacts(**facts))
    assert "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX" in line and "unset it" in line
    assert refusals(ServerFacts(**facts, disaggregation_transfer_backend="mooncake")) == []
    assert refusals(ServerFacts(**facts | {"disaggregation_mode": "decode"})) == []
    assert len(refusals(ServerFacts(**facts | {"device": "cpu"}, disaggregation_transfer_backend="mooncake"))) == 1


@pytest.mark.parametrize("dtype", ["mxfp8", "nvfp4", "fp4_mx_block16"])
def test_refusals_when_kv_has_scales_of_its_own_then_it_is_refused_whatever_it_is_called(dtype):
    (line,) = refusals(ServerFacts(kv_cache_dtype=dtype))
    assert f"--kv-cache-dtype {dtype}" in line


def test_page_server_when_the_ranks_leave_no_place_for_it_then_refused_with_the_way_out():
    assert page_server_slots_refusal(num_slots=62, num_shards=2) is None
    line = page_server_slots_refusal(num_slots=62, num_shards=3)
    assert "--banyan-listen" in line and "fewer ranks" in line


def test_secret_and_arena_when_they_cannot_serve_other_nodes_then_the_flag_is_named():
    assert secret_refusal(path="/s", error="no such file") == "--banyan-secret-file /s: no such file"
    line = arena_room_refusal(flag="--banyan-listen", free_bytes=1 << 30)
    assert line.startswith("--banyan-listen: of 1.00 GiB") and "--banyan-host-gb" in line


@pytest.mark.parametrize("algorithm", [None, "NGRAM", "ngram", "FROZEN_KV_MTP", *SHARED, "eagle3"])
def test_draft_when_it_is_shared_or_has_no_kv_then_it_is_not_refused(algorithm):
    assert draft_refusals(DraftFacts(algorithm=algorithm)) == []


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK", "UNO", "MY_OWN"])
def test_draft_when_its_algorithm_is_not_known_to_be_shared_then_one_line_says_which_are(algorithm):
    (line,) = draft_refusals(DraftFacts(algorithm=algorithm))
    assert f"--speculative-algorithm {algorithm}" in line and "EAGLE3" in line and "--banyan-share off" in line


@pytest.mark.parametrize(
    "facts, said",
    [
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"skips_draft_extend": True}, "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"),
    ],
)
def test_draft_when_its_rows_are_not_those_of_its_page_then_refused_and_without_a_draft_not(facts, said):
    (line,) = draft_refusals(DraftFacts(algorithm="EAGLE", **facts))
    assert said in line and any(way_out in line for way_out in ("--banyan-share off", "unset it"))
    assert draft_refusals(DraftFacts(**facts)) == draft_refusals(DraftFacts(algorithm="NGRAM", **facts)) == []


def test_draft_when_it_has_a_layer_for_each_step_then_only_those_of_the_model_itself_are_shared():
    for algorithm in ("EAGLE", "nextn"):
        assert draft_refusals(DraftFacts(algorithm=algorithm, has_layers_of_steps=True)) == []
    (line,) = draft_refusals(DraftFacts(algorithm="EAGLE3", has_layers_of_steps=True))
    assert "--enable-multi-layer-eagle with --speculative-algorithm EAGLE3" in line and "--banyan-share off" in line


def test_draft_when_its_attention_is_divided_as_the_models_then_it_is_not_refused_and_else_the_flag_is_named():
    assert draft_division_refusal(num_draft_shards=2, num_shards=2) is None
    line = draft_division_refusal(num_draft_shards=4, num_shards=1)
    assert "over 4 process(es) and the model's over 1" in line
    assert "drop --speculative-algorithm" in line and "--banyan-share off" in line


def test_facts_of_drafts_when_a_field_is_added_then_it_has_a_refusal_here():
    covered = {"algorithm", "has_layers_of_steps", "disaggregation_mode", "skips_draft_extend"}
    assert {field.name for field in fields(DraftFacts)} == covered


@pytest.mark.parametrize("said", [{"prefix_hints": False}, {"share": "off"}])
def test_policy_when_nothing_is_looked_up_then_the_way_out_that_is_named_is_one(said):
    with pytest.raises(ValueError, match=r"--banyan-policy lmetric: .*") as refused:
        Config(policy="lmetric", **said)
    line = str(refused.value)
    ways_out = {"drop --banyan-no-prefix-hints": {"prefix_hints": True}, "use --banyan-share index": {"share": "index"}}
    (way_out,) = [fields for words, fields in ways_out.items() if words in line]
    Config(policy="lmetric", **{**said, **way_out})
    Config(**{**said, "policy": "sglang"})
