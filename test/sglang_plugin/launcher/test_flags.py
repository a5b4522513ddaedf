# SPDX-License-Identifier: Apache-2.0
"""From the command line to SGLang's arguments, through SGLang's own plugin loader and parser."""

import logging
import os
import pickle
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from sglang.srt.managers import load_snapshot
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
from uvicorn.supervisors import Multiprocess

from banyan import SGLANG_VERSION, _native, faults, patches
from banyan import feature_list as features
from banyan.config import ARENA_FOLDER, HTTP_APP_VARIABLE, OFF_VARIABLE
from banyan.layout import Layout
from banyan.sglang_plugin import hook_queue, runtime, seams
from banyan.sglang_plugin.launcher import flags

BASE = ["--model-path", "nowhere", "--device", "cpu", "--dp", "2"]


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    load_plugins()
    seams.verify("main")


PAIRED = ["--disaggregation-transfer-backend", "nixl", "--disaggregation-mode"]
MOONCAKE = ["--disaggregation-transfer-backend", "mooncake", "--disaggregation-mode"]

REFUSED = {
    "--pp-size": (["--pp-size", "2"], "--pp-size 1"),
    "--page-size": (["--page-size", "1"], "--page-size 16"),
    "--nnodes": (["--nnodes", "2"], "--nnodes 1"),
    "--disable-radix-cache": (["--disable-radix-cache"], "drop that flag"),
    "--enable-hierarchical-cache": (["--enable-hierarchical-cache"], "use one of them"),
    "--enable-lmcache": (["--enable-lmcache"], "use one of them"),
    "--load-format": (["--load-format", "dummy", "--banyan-store", "s", "--banyan-host-gb", "1"], "--load-format auto"),
    "--unified-cache-external-linker-backend": (["--enable-unified-cache-external-linker"], "drop that flag"),
    "--speculative-algorithm": (["--speculative-algorithm", "DFLASH"], "drop that flag"),
    "--enable-multi-layer-eagle": (
        ["--speculative-algorithm", "EAGLE3", "--enable-multi-layer-eagle"],
        "drop that flag",
    ),
    "--disaggregation-transfer-backend": (
        ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mori"],
        "backend nixl",
    ),
    "--disaggregation-decode-allocation-policy": (
        [*MOONCAKE, "decode", "--disaggregation-decode-allocation-policy", "prefill_complete"],
        "policy early on both servers",
    ),
    "--disaggregation-decode-retraction-backup": (
        [*PAIRED, "decode", "--disaggregation-decode-retraction-backup", "host_pool"],
        "drop those flags",
    ),
    "--banyan-store s3": (["--banyan-store", "s3:///x", "--banyan-host-gb", "1"], "use one of 3fs, file"),
    "--banyan-store-admit": (
        [*PAIRED, "decode", "--banyan-store", "s", "--banyan-host-gb", "1", "--banyan-store-admit", "second"],
        "use first",
    ),
    "--load-balance-method": (
        [*PAIRED, "prefill", "--load-balance-method", "follow_bootstrap_room", "--banyan-policy", "lmetric"],
        "drop one of the two",
    ),
    "--device xpu": (["--device", "xpu"], "--banyan-share off"),
    "--dp-size": (["--dp", "65"], "use fewer"),
    "--enable-dsa-cache-layer-split": (["--enable-dsa-cache-layer-split"], "--banyan-share off"),
    "--attn-cp-size": (
        ["--tp-size", "2", "--attn-cp-size", "2", "--speculative-algorithm", "EAGLE"],
        "--banyan-share off",
    ),
    "--enable-prefill-cp": (["--enable-prefill-cp", *PAIRED, "prefill"], "--banyan-share off"),
    "--dcp-size": (["--dcp-size", "2"], "--banyan-share off"),
    "--enable-pdmux": (["--enable-pdmux"], "--banyan-share off"),
    "--dllm-algorithm": (["--dllm-algorithm", "LowConfidence"], "--banyan-share off"),
    "--enable-return-routed-experts": (["--enable-return-routed-experts"], "--banyan-share off"),
    "--enable-return-indexer-topk": (["--enable-return-indexer-topk"], "--banyan-share off"),
    "--enable-mis": (["--enable-mis"], "--banyan-share off"),
    "--enable-deterministic-inference": (
        ["--enable-deterministic-inference", "--attention-backend", "flashinfer"],
        "fa3 or triton",
    ),
    "--enable-page-major-kv-layout": (["--enable-page-major-kv-layout"], "--banyan-share off"),
    "--banyan-min-fetch-tokens": (["--banyan-min-fetch-tokens", "0"], "at least 1"),
    "--kv-canary": (["--kv-canary", "log"], "--banyan-share off"),
}


@pytest.mark.parametrize("asked", [["DFLASH"], ["DSPARK"], ["EAGLE3", *PAIRED, "prefill"]], ids=lambda asked: asked[0])
def test_start_when_an_algorithm_only_says_which_states_are_captured_then_there_are_no_drafts_to_refuse(
    asked, clean_environment
):
    carried = runtime.bookkeeping(
        prepare_server_args(
            [*BASE, "--enable-banyan", "--enable-return-aux-hidden-states", "--speculative-algorithm", *asked]
        )
    )
    assert "drafts" not in carried["needed"]


@pytest.mark.parametrize("flag", REFUSED)
def test_start_when_the_combination_cannot_work_then_one_line_and_exit_2(flag, capsys):
    extra, way_out = REFUSED[flag]
    with pytest.raises(SystemExit) as exit_info:
        prepare_server_args([*BASE, "--enable-banyan", *extra])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("banyan: refused:")]
    assert exit_info.value.code == 2
    assert len(lines) == 1 and flag in lines[0] and way_out in lines[0]


def test_start_when_sglang_is_another_release_then_refused(monkeypatch, capsys):
    monkeypatch.setattr(flags.importlib.metadata, "version", lambda name: "0.5.24")
    with pytest.raises(SystemExit):
        prepare_server_args([*BASE, "--enable-banyan"])
    assert "sglang 0.5.24 is installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        (["--banyan-tenant-secret-file", "s"], "--banyan-tenant-secret-file"),
        (["--banyan-host-gb", "2", "--banyan-no-prefix-hints"], "--banyan-no-prefix-hints, --banyan-host-gb"),
    ],
)
def test_start_when_banyans_flags_are_given_without_turning_it_on_then_refused(given, flags, capsys):
    with pytest.raises(SystemExit):
        prepare_server_args([*BASE, *given])
    assert f"banyan: refused: {flags}: has no effect without --enable-banyan" in capsys.readouterr().err


def test_start_when_banyan_itself_fails_then_no_other_server_is_started_in_its_place(monkeypatch, capsys):
    monkeypatch.setattr(flags.last_words, "listen", Mock(side_effect=OSError("no descriptor left")))
    with pytest.raises(SystemExit):
        prepare_server_args([*BASE, "--enable-banyan"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("banyan: refused:")]
    assert "no descriptor left" in line and "without --enable-banyan" in line


@pytest.mark.parametrize(("kept_gib", "is_refused"), [(0, True), (1, True), (2, False)])
def test_start_when_the_arena_is_larger_than_what_is_free_then_refused_before_any_rank_has_its_weights(
    monkeypatch, capsys, kept_gib, is_refused
):
    monkeypatch.setattr(_native, "available_bytes", lambda: 2 << 30)
    asked = ["--enable-banyan", "--banyan-host-gb", "4"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if kept_gib:
            (part := Path(folder, ARENA_FOLDER, "part-0")).parent.mkdir(mode=0o700)
            part.touch()
            os.truncate(part, kept_gib << 30)
            asked += ["--banyan-keep-host-arena", folder]
        with pytest.raises(SystemExit) if is_refused else nullcontext():
            prepare_server_args([*BASE, *asked])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("banyan: refused:")]
    assert lines == [f"banyan: refused: --banyan-host-gb 4: {2 + kept_gib}.00 GiB of memory are free: lower it"] * (
        is_refused
    )


def test_start_when_pages_may_meet_those_of_others_then_the_ranks_hear_by_which_code_they_are_computed(tmp_path):
    storing = ["--banyan-store", str(tmp_path), "--banyan-host-gb", "1"]
    alone, others = (
        runtime.bookkeeping(prepare_server_args([*BASE, "--enable-banyan", *flags]))["engine"]
        for flags in ([], storing)
    )
    assert alone == f"sglang {SGLANG_VERSION}"
    assert others.startswith(f"{alone} ") and len(others) == len(alone) + 65


def test_start_when_what_serves_the_store_does_not_answer_yet_then_that_is_said_and_the_ranks_ask_again(monkeypatch):
    told = Mock(wraps=flags.logger)
    monkeypatch.setattr(flags, "logger", told)
    asked = ["--enable-banyan", "--banyan-store", "mooncake://127.0.0.1:1", "--banyan-host-gb", "1"]
    assert runtime.bookkeeping(prepare_server_args([*BASE, *asked])) is not None
    (line,) = [call.args for call in told.warning.call_args_list]
    assert "does not answer yet" in line[0]


def test_start_when_ranks_share_nothing_then_what_is_idle_is_said_once_and_no_arena_is_asked_for(monkeypatch):
    told = Mock(wraps=flags.logger)
    monkeypatch.setattr(flags, "logger", told)
    prepare_server_args([*BASE, "--enable-banyan", "--banyan-share", "off", "--banyan-store", "/nvme0/kv"])
    (line,) = [call.args for call in told.warning.call_args_list]
    assert line[1].startswith("--banyan-store with --banyan-share off")


def test_start_when_banyan_is_not_asked_for_then_the_arguments_are_stock():
    args = prepare_server_args(BASE)
    assert runtime.bookkeeping(args) is None and not hasattr(args, runtime.IS_OFF)
    assert not args.enable_unified_cache_external_linker
    assert args.page_size is None and args.attention_backend is None


def test_start_when_sharing_then_linker_and_attention_are_set_and_travel():
    args = pickle.loads(pickle.dumps(prepare_server_args([*BASE, "--enable-banyan"])))
    assert args.unified_cache_external_linker_backend == "dynamic"
    assert args.unified_cache_external_linker_config["linker"] == "Linker"
    assert args.attention_backend == "banyan_cpu"
    carried = runtime.bookkeeping(args)
    assert carried["config"].share == "peer"
    assert carried["rank_table"].startswith("/proc/")


def test_start_when_the_user_chose_page_size_and_attention_then_they_stay():
    chosen = ["--page-size", "32", "--attention-backend", "torch_native"]
    args = prepare_server_args([*BASE, "--enable-banyan", *chosen])
    assert (args.page_size, args.attention_backend) == (32, "torch_native")


def test_start_when_the_arenas_size_is_left_open_then_it_has_member_slots():
    args = prepare_server_args([*BASE, "--enable-banyan"])
    assert _native.RankTable.open(runtime.bookkeeping(args)["rank_table"]).num_slots == 4


def test_start_when_the_model_has_windows_then_failures_of_this_process_are_counted_where_the_ranks_meet(monkeypatch):
    monkeypatch.setattr(faults, "_counts", Counter())
    carried = runtime.bookkeeping(prepare_server_args([*BASE, "--enable-banyan"]))
    faults.note("here", ValueError())
    flags.reserve_window_slots(carried)
    faults.note("here", ValueError())
    table = _native.RankTable.open(carried["rank_table"])
    assert (table.num_slots, table.num_failures) == (8, 2)


def test_start_when_a_program_starts_two_engines_then_the_ranks_of_both_find_where_they_meet():
    both = [runtime.bookkeeping(prepare_server_args([*BASE, "--enable-banyan"])) for _ in range(2)]
    for carried in both:
        assert _native.RankTable.open(carried["rank_table"]).num_slots == 4
        flags.reserve_window_slots(carried)
        assert _native.RankTable.open(carried["rank_table"]).num_slots == 8


def test_start_when_the_ranks_leave_no_member_slots_then_without_the_arena_and_said(capsys):
    args = prepare_server_args([*BASE[:-1], "40", "--enable-banyan"])
    carried = runtime.bookkeeping(args)
    assert _native.RankTable.open(carried["rank_table"]).num_slots == 40
    assert carried["config"].host_gb == 0
    assert "no host arena" in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked",
    [
        ["--banyan-store", "/kv"],
        ["--banyan-listen", "10.0.0.1:7400", "--banyan-secret-file", "{}"],
        ["--banyan-tenant-share", "0.2", "--banyan-tenant-secret-file", "{}"],
    ],
    ids=lambda asked: asked[0],
)
def test_start_when_what_needs_an_arena_finds_no_slots_for_it_then_refused_for_these_alone(asked, tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0" * 64)
    with pytest.raises(SystemExit):
        prepare_server_args([*BASE[:-1], "40", "--enable-banyan", *(word.format(secret) for word in asked)])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("banyan: refused:")]
    assert lines and all("80 member slots" in line and "use fewer" in line for line in lines)


def test_start_when_there_are_several_http_workers_then_they_serve_what_has_hooks(clean_environment, capsys):
    workers = [*BASE, "--enable-banyan", "--tokenizer-worker-num", "2"]
    for _ in range(2):
        prepare_server_args(workers)
        assert os.environ[HTTP_APP_VARIABLE] == flags.HTTP_WORKER
    assert hasattr(Multiprocess, "handle_quit"), "a process that ends ends the server"
    os.environ[HTTP_APP_VARIABLE] = "other:app"
    prepare_server_args([*BASE, "--enable-banyan"])
    for more in ([], ["--banyan-share", "off"]):
        with pytest.raises(SystemExit):
            prepare_server_args([*workers, *more])
        assert "SGLANG_HTTP_SERVER_APP_PATH" in capsys.readouterr().err
        assert os.environ[HTTP_APP_VARIABLE] == "other:app"


def test_start_when_a_server_lies_on_several_nodes_then_the_rank_table_is_of_this_one():
    over = [*BASE[:-2], "--tp-size", "8", "--attn-dp-size", "4", "--nnodes", "2", "--node-rank", "1"]
    carried = runtime.bookkeeping(prepare_server_args([*over, "--enable-banyan"]))
    assert carried["layout"].ranks_here == range(2, 4)
    assert _native.RankTable.open(carried["rank_table"]).num_slots == 8


@pytest.mark.parametrize(
    "mode", [[], ["--disaggregation-transfer-backend", "nixl", "--disaggregation-mode", "prefill"]]
)
def test_start_when_a_server_lies_on_several_nodes_then_its_dispatcher_hears_the_loads_of_all_ranks(
    clean_environment, monkeypatch, mode
):
    over = [*BASE[:-2], "--tp-size", "8", "--attn-dp-size", "4", "--nnodes", "2", *mode, "--enable-banyan"]
    method = prepare_server_args(over).load_balance_method
    parallel = SimpleNamespace(attn_dp_enabled=True, nnodes=2, node_rank=0, num_dp_ranks=4, load_balance_method=method)
    monkeypatch.setattr(load_snapshot, "get_parallel", lambda: parallel)
    monkeypatch.setattr(load_snapshot, "get_serving", lambda: SimpleNamespace(tokenizer_worker_num=1))
    callers = ("DataParallelController", "TokenizerManager")
    assert [load_snapshot.zmq_reader_owner(caller) for caller in callers] == [True, False]
    assert prepare_server_args([*over, "--load-balance-method", "round_robin"]).load_balance_method == "round_robin"


def test_start_when_sharing_is_off_then_only_the_cpu_engine_is_on():
    args = prepare_server_args([*BASE, "--enable-banyan", "--banyan-share", "off"])
    assert not args.enable_unified_cache_external_linker
    assert args.attention_backend == "banyan_cpu"
    carried = runtime.bookkeeping(args)
    assert "rank_table" not in carried and Path(carried["taken"]).exists()


def misfit(name):
    """One patch of a feature, unfit."""
    patch = next(patch for patch in seams.HOOKS.queue if patch.feature == name)
    return patches.Misfit(patch, patch.places[0], "it has changed")


def make_unfit(monkeypatch, *names):
    unfit = [misfit(name) for name in names]
    monkeypatch.setattr(patches, "changed", lambda queue: unfit if queue is seams.HOOKS.queue else [])


def test_start_when_the_source_of_a_core_patch_has_changed_then_stock_with_a_reason(monkeypatch, capsys):
    queue = [replace(one, fingerprint="0000") if one.name == "20-kv-pool" else one for one in seams.HOOKS.queue]
    monkeypatch.setattr(seams.HOOKS, "queue", queue)
    args = prepare_server_args([*BASE, "--enable-banyan"])
    assert runtime.bookkeeping(args) is None and getattr(args, runtime.IS_OFF)
    assert not args.enable_unified_cache_external_linker
    # SGLang configures logging while it parses, so the line is on the real stderr.
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "banyan: " in line]
    assert "banyan: off" in line and "core/20-kv-pool" in line and "(0000 ->" in line


@pytest.mark.parametrize("name", sorted({patch.feature for patch in patches.load_queue()} - {features.CORE}))
def test_start_when_a_patch_of_another_feature_has_changed_then_that_is_off_with_one_line_and_sharing_is_on(
    name, monkeypatch, capsys
):
    make_unfit(monkeypatch, name)
    told = Mock(wraps=flags.logger)
    monkeypatch.setattr(flags, "logger", told)
    args = prepare_server_args([*BASE, "--enable-banyan"])
    carried = pickle.loads(pickle.dumps(runtime.bookkeeping(args)))
    assert carried["needed"] == ["core"]
    assert args.enable_unified_cache_external_linker
    (off,) = carried["off"]
    assert off == (misfit(name).patch.name if name in ("guards", "observe") else name)
    assert not runtime.is_on(off) and os.environ[OFF_VARIABLE] == off
    lines = [line for line in capsys.readouterr().err.splitlines() if f"banyan: {off} is off" in line]
    assert len(lines) == 1 and f"install sglang=={SGLANG_VERSION}" in lines[0]
    # What this server has no use for is no warning.
    unused = ("windows", "states", "index_keys", "images", "drafts", "adapters", "pairs", "tenant_share", "ray_actors")
    is_unused = name in unused
    assert told.log.call_args.args[0] == (logging.INFO if is_unused else logging.WARNING)
    assert carried["config"].policy == ("sglang" if name == "placement" else "lmetric")
    assert args.attention_backend == "banyan_cpu"


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        (features.CORE, ["--tp-size", "8", "--attn-dp-size", "4", "--dp", "1", "--nnodes", "2"]),
        (features.CORE, ["--tokenizer-worker-num", "2"]),
        ("drafts", ["--speculative-algorithm", "NGRAM"]),
        ("ray_actors", ["--dp", "1", "--use-ray"]),
        ("adapters", ["--enable-lora", "--lora-paths", "a=b"]),
        ("pairs", [*PAIRED, "decode"]),
        ("planner", ["--tp-size", "2", "--enable-dp-attention"]),
        ("answers", ["--banyan-no-answer-details"]),
    ],
)
def test_start_when_the_flags_need_a_feature_that_is_off_then_refused_by_name(name, asked, monkeypatch, capsys):
    make_unfit(monkeypatch, name)
    with pytest.raises(SystemExit):
        prepare_server_args([*BASE, "--enable-banyan", *asked])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("banyan: refused:")]
    flag = [word for word in asked if word.startswith("--")][-1]
    assert f"needs Banyan's {name}" in line and line.startswith(f"banyan: refused: {flag}")


def test_start_when_features_fit_again_then_the_processes_to_come_hear_of_none_that_is_off(monkeypatch):
    monkeypatch.setenv(OFF_VARIABLE, "victims")
    make_unfit(monkeypatch)
    prepare_server_args([*BASE, "--enable-banyan"])
    assert os.environ[OFF_VARIABLE] == ""


def test_hook_when_its_feature_is_switched_off_then_it_passes_through():
    (patch,) = [patch for patch in seams.HOOKS.queue if patch.name == "52-openai-cached-tokens"]
    hook = seams.HOOKS.while_on(patch, lambda result, details: ("ours", result))
    assert hook("theirs", None) == ("ours", "theirs")
    runtime.switch_off("answers")
    assert hook("theirs", None) is None
    (patch,) = [patch for patch in seams.HOOKS.queue if patch.name == "41-event-loop"]
    hook = seams.HOOKS.while_on(patch, lambda original: not original())
    assert hook(lambda: False) is True
    runtime.switch_off("placement")
    assert hook(lambda: False) is False


def test_hook_when_its_result_is_known_then_it_is_not_called_and_a_failure_to_know_is_counted(monkeypatch):
    (patch,) = [patch for patch in seams.HOOKS.queue if patch.name == "50-cached-tokens"]
    known = {"a": ("remembered",), "b": (None,), "c": None}
    hook = seams.HOOKS.while_on(
        patch, hook_queue.known_by(lambda request: known[request])(lambda original, request: original(request))
    )
    assert [hook(str.upper, request) for request in "abc"] == ["remembered", None, "C"]
    monkeypatch.setattr(faults, "_counts", Counter())
    assert hook(str.upper, "d") == "D"
    assert faults.counts() == {"50-cached-tokens": 1}


def test_start_when_flags_stand_in_a_file_of_sglangs_then_they_are_taken_and_the_command_line_wins(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text(
        "model-path: nowhere\ndevice: cpu\ndp: 2\nenable-banyan: true\nbanyan-host-gb: 3\nbanyan-plan: move\n"
        "banyan-no-prefix-hints: true\nbanyan-store: /nvme0/kv,/nvme1/kv\n"
    )
    taken = runtime.bookkeeping(prepare_server_args(["--config", str(file), "--banyan-plan", "measured"]))["config"]
    assert (taken.host_gb, taken.plan, taken.prefix_hints) == (3.0, "measured", False)
    assert taken.store == ("/nvme0/kv", "/nvme1/kv")


def test_start_when_a_file_of_sglangs_switches_sharing_off_in_yamls_words_then_it_is_off(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("model-path: nowhere\ndevice: cpu\nenable-banyan: true\nbanyan-share: off\n")
    assert runtime.bookkeeping(prepare_server_args(["--config", str(file)]))["config"].share == "off"


@pytest.mark.parametrize("line", ["banyan-host-gb: -1", "banyan-hots-gb: 3"])
def test_start_when_a_file_of_sglangs_holds_a_wrong_flag_then_it_is_refused_by_its_name(tmp_path, capsys, line):
    file = tmp_path / "server.yaml"
    file.write_text(f"model-path: nowhere\ndevice: cpu\nenable-banyan: true\n{line}\n")
    with pytest.raises(SystemExit):
        prepare_server_args(["--config", str(file)])
    assert line.partition(":")[0] in capsys.readouterr().err


@pytest.fixture
def clean_environment(monkeypatch):
    """Variables that a start sets for its processes end with the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_start_when_the_server_decodes_then_it_has_a_radix_cache_and_holds_pages_for_late_writes(clean_environment):
    args = prepare_server_args([*BASE, "--enable-banyan", *PAIRED, "decode"])
    assert args.disaggregation_decode_enable_radix_cache
    assert os.environ["SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"] == "300"
    assert runtime.bookkeeping(args)["config"].store_admit == "first"


@pytest.mark.parametrize(
    ("ranks", "policy"), [(["--dp", "2"], "lmetric"), (["--tp-size", "2", "--attn-dp-size", "2"], "level")]
)
def test_start_when_the_server_prefills_then_the_policy_chooses_ranks_and_not_the_room(
    clean_environment, ranks, policy
):
    args = prepare_server_args([*BASE[:-2], *ranks, "--enable-banyan", *PAIRED, "prefill"])
    assert args.load_balance_method == "round_robin"
    assert runtime.bookkeeping(args)["config"].policy == policy
    assert os.environ["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] == "0"


def test_start_when_the_user_set_a_variable_then_it_stays_and_one_that_cannot_is_refused(clean_environment, capsys):
    os.environ["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] = '{"num_threads": "2"}'
    prepare_server_args([*BASE, "--enable-banyan", *PAIRED, "prefill"])
    assert os.environ["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] == '{"num_threads": "2"}'
    os.environ["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "1"
    with pytest.raises(SystemExit):
        prepare_server_args([*BASE, "--enable-banyan", *PAIRED, "prefill"])
    assert "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX" in capsys.readouterr().err


def test_start_when_the_hand_over_has_a_class_then_its_processes_inherit_it(clean_environment):
    marks = ["--banyan-dscp", "8", "--banyan-ib-service-level", "3"]
    prepare_server_args([*BASE, "--enable-banyan", *PAIRED, "decode", *marks])
    assert (os.environ["UCX_IB_TRAFFIC_CLASS"], os.environ["UCX_IB_SL"]) == ("32", "3")


def test_start_when_the_room_chooses_the_rank_then_sglang_places_requests(clean_environment):
    asked = [*PAIRED, "prefill", "--load-balance-method", "follow_bootstrap_room"]
    args = prepare_server_args([*BASE, "--enable-banyan", *asked])
    assert args.load_balance_method == "follow_bootstrap_room"
    assert runtime.bookkeeping(args)["config"].policy == "sglang"


def resolved(monkeypatch, words, **fields):
    """Arguments that a program has built, after SGLang has resolved them; a dummy model leaves them nearly as given."""
    monkeypatch.setenv("BANYAN_FLAGS", words)
    args = ServerArgs(model_path="dummy", device="cpu", **fields)
    args.resolve_once()
    return args


def test_engine_when_the_environment_says_so_then_sharing_is_on_for_arguments_that_a_program_built(monkeypatch):
    args = resolved(monkeypatch, "--enable-banyan --banyan-host-gb 2", dp_size=2)
    carried = runtime.bookkeeping(args)
    assert (carried["config"].host_gb, carried["config"].policy) == (2.0, "lmetric")
    assert carried["layout"] == Layout(dp=2, attn_dp=1, attn_cp=1, attn_tp=1)
    assert args.unified_cache_external_linker_backend == "dynamic" and args.page_size == 16


def test_engine_when_the_environment_says_something_impossible_then_one_line_and_exit_2(monkeypatch, capsys):
    for words, fields, line in (
        ("--enable-banyan", {"pp_size": 2}, "--pp-size 1"),
        ("--banyan-host-gb 2", {}, "does not say --enable-banyan"),
        ("--enable-banyan --banyan-store '/a", {}, "BANYAN_FLAGS: No closing quotation"),
    ):
        with pytest.raises(SystemExit):
            resolved(monkeypatch, words, **fields)
        assert line in capsys.readouterr().err


def test_engine_when_plugins_come_after_its_arguments_were_resolved_then_one_line_says_what_to_call(
    monkeypatch, capsys
):
    args = ServerArgs(model_path="dummy", device="cpu")
    args.resolve_once()
    monkeypatch.setenv("BANYAN_FLAGS", "--enable-banyan")
    with pytest.raises(SystemExit):
        args.resolve_once()
    assert "load_plugins()" in capsys.readouterr().err


def test_engine_when_sglang_is_not_the_one_then_it_starts_without_banyan_however_often_it_looks(monkeypatch, capsys):
    make_unfit(monkeypatch, features.CORE)
    args = resolved(monkeypatch, "--enable-banyan")
    args.resolve_once()
    assert runtime.bookkeeping(args) is None and "refused" not in capsys.readouterr().err


def test_engine_when_the_command_line_has_spoken_then_the_environment_is_not_asked(monkeypatch):
    monkeypatch.setenv("BANYAN_FLAGS", "--enable-banyan --banyan-host-gb 2")
    args = prepare_server_args(["--model-path", "dummy", "--device", "cpu", "--dp", "2", "--enable-banyan"])
    args.resolve_once()
    assert runtime.bookkeeping(args)["config"].host_gb != 2.0


@pytest.mark.parametrize("spelling", [["--attn-dp-size", "2"], ["--dp", "2", "--enable-dp-attention"]])
def test_start_when_ranks_step_together_then_the_fullest_decides(spelling):
    attention = ["--model-path", "nowhere", "--device", "cpu", "--tp", "2", *spelling, "--enable-banyan"]
    carried = runtime.bookkeeping(prepare_server_args(attention))
    assert carried["layout"] == Layout(dp=1, attn_dp=2, attn_cp=1, attn_tp=1)
    assert carried["config"].policy == "level"
    named = prepare_server_args([*attention, "--banyan-policy", "affinity"])
    assert runtime.bookkeeping(named)["config"].policy == "affinity"


@pytest.mark.parametrize(
    ("more", "mode", "way_out"),
    [
        (["--is-embedding"], 0o600, "a server of its own"),
        (["--smg-grpc-mode"], 0o600, "serve HTTP"),
        (["--grpc-port", "30001"], 0o600, "serve HTTP"),
        (["--banyan-share", "off"], 0o600, "--banyan-share index"),
        ([], 0o644, "chmod 600"),
    ],
)
def test_start_when_a_server_cannot_keep_tenants_apart_then_refused(tmp_path, capsys, more, mode, way_out):
    lines = _refused_with_tenants(tmp_path, capsys, more, mode)
    assert any("--banyan-tenant-secret-file" in line and way_out in line for line in lines)


def test_start_when_the_environment_opens_a_port_that_knows_no_tenants_then_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SGLANG_GRPC_PORT", "30001")
    assert any("SGLANG_GRPC_PORT" in line for line in _refused_with_tenants(tmp_path, capsys, [], 0o600))


def test_start_when_a_server_has_tenants_then_no_warm_up_comes_to_it_by_http(tmp_path):
    assert prepare_server_args(_with_tenants(tmp_path, 0o600)).skip_server_warmup
    assert not prepare_server_args([*BASE, "--enable-banyan"]).skip_server_warmup


def _with_tenants(tmp_path, mode):
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    secret.chmod(mode)
    return [*BASE, "--enable-banyan", "--banyan-tenant-secret-file", str(secret)]


def _refused_with_tenants(tmp_path, capsys, more, mode):
    """The lines with which a server that was to keep tenants apart has ended."""
    with pytest.raises(SystemExit):
        prepare_server_args([*_with_tenants(tmp_path, mode), *more])
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("banyan: refused:")]
