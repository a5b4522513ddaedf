# SPDX-License-Identifier: Apache-2.0
"""From the command line to SGLang's arguments, through SGLang's own plugin loader and parser."""

import pickle

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from banyan.pacing import SlackTable
from banyan.planner import PrefillCost, Profile, profile
from banyan.sglang_plugin import flags, runtime, seams

BASE = ["--model-path", "nowhere", "--device", "cpu", "--dp", "2"]


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    load_plugins()
    seams.verify("main")


REFUSED = {
    "--pp-size": (["--pp-size", "2"], "--pp-size 1"),
    "--page-size": (["--page-size", "1"], "--page-size 16"),
    "--nnodes": (["--nnodes", "2"], "--nnodes 1"),
    "--tokenizer-worker-num": (["--tokenizer-worker-num", "2"], "--tokenizer-worker-num 1"),
    "--disable-radix-cache": (["--disable-radix-cache"], "drop that flag"),
    "--enable-hierarchical-cache": (["--enable-hierarchical-cache"], "use one of them"),
    "--enable-lmcache": (["--enable-lmcache"], "use one of them"),
    "--enable-memory-saver": (["--enable-memory-saver"], "start without"),
    "--unified-cache-external-linker-backend": (["--enable-unified-cache-external-linker"], "drop that flag"),
    "--speculative-algorithm": (["--speculative-algorithm", "NGRAM"], "drop that flag"),
    "--disaggregation-mode": (["--disaggregation-mode", "prefill"], "drop that flag"),
    "--device xpu": (["--device", "xpu"], "--banyan-share off"),
    "--dp-size": (["--dp", "65"], "--dp-size 64"),
    "--banyan-min-fetch-tokens": (["--banyan-min-fetch-tokens", "0"], "at least 1"),
}


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


def test_start_when_banyan_is_not_asked_for_then_the_arguments_are_stock():
    args = prepare_server_args(BASE)
    assert runtime.bookkeeping(args) is None
    assert not args.enable_unified_cache_external_linker
    assert args.page_size is None and args.attention_backend is None


def test_start_when_sharing_then_linker_page_size_and_attention_are_set_and_travel():
    args = pickle.loads(pickle.dumps(prepare_server_args([*BASE, "--enable-banyan"])))
    assert args.unified_cache_external_linker_backend == "dynamic"
    assert args.unified_cache_external_linker_config["linker"] == "BanyanLinker"
    assert (args.page_size, args.attention_backend) == (16, "banyan_cpu")
    carried = runtime.bookkeeping(args)
    assert carried["config"]["share"] == "peer"
    assert carried["roster"].startswith("/proc/")


def test_start_when_the_user_chose_page_size_and_attention_then_they_stay():
    chosen = ["--page-size", "32", "--attention-backend", "torch_native"]
    args = prepare_server_args([*BASE, "--enable-banyan", *chosen])
    assert (args.page_size, args.attention_backend) == (32, "torch_native")


def test_start_when_sharing_is_off_then_only_the_cpu_fixes_are_on():
    args = prepare_server_args([*BASE, "--enable-banyan", "--banyan-share", "off"])
    assert not args.enable_unified_cache_external_linker
    assert args.attention_backend == "banyan_cpu"
    assert "roster" not in runtime.bookkeeping(args)


def test_start_when_an_upstream_source_has_changed_then_stock_with_a_reason(monkeypatch, capsys):
    monkeypatch.setattr(seams, "changed", lambda: ["patch 20-kv-pool: x has changed"])
    args = prepare_server_args([*BASE, "--enable-banyan"])
    assert runtime.bookkeeping(args) is None
    assert not args.enable_unified_cache_external_linker
    # SGLang configures logging while it parses, so the line is on the real stderr.
    assert "banyan: off" in (err := capsys.readouterr().err) and "20-kv-pool" in err


def saved_profile(folder):
    path = folder / "profile.json"
    cost = PrefillCost(1.0, 1.0, 0.0, 0.0)
    slack = SlackTable((16,), (0,), ((1.0,),))
    kept = Profile(
        format=profile.FORMAT,
        model="m",
        num_layers=30,
        provenance={},
        samples=[],
        held_out=[],
        held_out_error=0.1,
        cost=cost,
        slack=slack,
    )
    profile.save(kept, path)
    return str(path)


def test_start_when_a_quota_is_given_then_decodes_get_their_turn_between_chunks(tmp_path):
    quota = ["--banyan-profile", saved_profile(tmp_path), "--banyan-prefill-quota-ms", "100"]
    assert prepare_server_args([*BASE, "--enable-banyan", *quota]).prefill_decode_interval == 1
    chosen = ["--prefill-decode-interval", "3"]
    assert prepare_server_args([*BASE, "--enable-banyan", *quota, *chosen]).prefill_decode_interval == 3


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--banyan-profile", "/nowhere/profile.json"], "--banyan-profile /nowhere/profile.json"),
        (["--banyan-prefill-quota-ms", "100"], "banyan profile"),
    ],
)
def test_start_when_times_cannot_be_predicted_then_refused_with_the_way_out(flags, named, capsys):
    with pytest.raises(SystemExit):
        prepare_server_args([*BASE, "--enable-banyan", *flags])
    assert named in capsys.readouterr().err
