# SPDX-License-Identifier: Apache-2.0
"""Who runs with the engine: from the command line and from a program to SGLang's arguments, with Banyan and without."""

import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from sglang.srt.arg_groups import mamba_hook
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from banyan import SGLANG_VERSION, patches
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher import cpu_engine
from banyan_cpu_engine import ATTENTION_BACKEND, launcher, seam, server

BASE = ["--model-path", "nowhere", "--device", "cpu", "--dp", "2"]
ON_GPUS = ["--model-path", "nowhere", "--device", "cuda"]


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    load_plugins()
    assert seam.HOOKS.missing("main") == []


@pytest.fixture
def unfit(monkeypatch):
    """The engine does not fit the SGLang that is installed; Banyan does."""
    patch = seam.HOOKS.queue[0]
    misfit = patches.Misfit(patch, patch.places[0], "it has changed")
    monkeypatch.setattr(patches, "changed", lambda queue: [misfit] if queue is seam.HOOKS.queue else [])


@pytest.mark.parametrize(("flags", "is_banyans"), [([launcher.FLAG], False), (["--enable-banyan"], True)])
def test_server_when_it_is_asked_for_then_every_process_hears_it_and_it_attends_as_the_engine_does(flags, is_banyans):
    args = pickle.loads(pickle.dumps(prepare_server_args([*BASE, *flags])))
    assert server.is_marked(args) and args.attention_backend == ATTENTION_BACKEND
    assert (runtime.bookkeeping(args) is not None) is is_banyans
    assert args.enable_unified_cache_external_linker is is_banyans
    assert args.page_size is None


def test_server_when_nobody_asks_for_it_then_the_arguments_are_stock():
    args = prepare_server_args(BASE)
    assert not server.is_marked(args) and args.attention_backend is None


@pytest.mark.parametrize("has_amx", [True, False])
def test_server_when_sglang_would_attend_with_amx_then_one_line_says_how_to_have_that(has_amx, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "cpu_has_amx_support", lambda: has_amx)
    assert prepare_server_args([*BASE, launcher.FLAG]).attention_backend == ATTENTION_BACKEND
    prepare_server_args([*BASE, launcher.FLAG, "--attention-backend", "torch_native"])
    assert capsys.readouterr().err.count("--attention-backend intel_amx") == has_amx


def test_server_when_it_has_its_own_attention_then_that_stays():
    args = prepare_server_args([*BASE, launcher.FLAG, "--attention-backend", "torch_native"])
    assert server.is_marked(args) and args.attention_backend == "torch_native"


def test_server_when_it_is_to_give_memory_back_then_no_rank_loads_a_library_for_gpus_and_one_line_says_so(capsys):
    args = prepare_server_args([*BASE, "--enable-banyan", "--enable-memory-saver"])
    assert server.is_marked(args) and not args.enable_memory_saver
    assert capsys.readouterr().err.count("--enable-memory-saver is for GPUs") == 1


@pytest.mark.parametrize("field", launcher.NAMING)
def test_program_when_it_names_the_attention_then_it_gets_the_rest_of_the_engine(field):
    args = ServerArgs(model_path="dummy", device="cpu", **{field: ATTENTION_BACKEND})
    launcher.before_resolve_once(args)
    assert server.is_marked(args) and runtime.bookkeeping(args) is None
    other = ServerArgs(model_path="dummy", device="cpu")
    launcher.before_resolve_once(other)
    assert not server.is_marked(other)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*ON_GPUS, launcher.FLAG], f"{launcher.FLAG}: --device cuda has attention of SGLang's own: drop that flag"),
        ([*BASE, launcher.FLAG], "it has changed"),
    ],
)
def test_server_when_the_engine_cannot_serve_it_then_refused_in_one_line(arguments, said, unfit, capsys):
    with pytest.raises(SystemExit):
        prepare_server_args(arguments)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("banyan: refused:")]
    assert said in line and "drop that flag" in line


def test_server_of_banyans_when_the_engine_does_not_fit_then_it_shares_with_sglangs_own_attention(unfit, monkeypatch):
    told = Mock(wraps=launcher.logger)
    monkeypatch.setattr(launcher, "logger", told)
    args = prepare_server_args([*BASE, "--enable-banyan"])
    assert not server.is_marked(args) and args.attention_backend is None
    assert args.enable_unified_cache_external_linker
    ((_, said),) = (call.args for call in told.warning.call_args_list)
    assert "cpu_engine/" in said and f"install sglang=={SGLANG_VERSION}" in said


def test_server_of_banyans_when_its_attention_is_the_engines_which_does_not_fit_then_refused(unfit, capsys):
    args = prepare_server_args([*BASE, "--enable-banyan", "--attention-backend", ATTENTION_BACKEND])
    with pytest.raises(SystemExit):
        launcher.before_resolve_once(args)
    assert f"--attention-backend {ATTENTION_BACKEND}: it does not fit" in capsys.readouterr().err


def test_server_of_banyans_when_no_engine_is_installed_then_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(cpu_engine, "_start", None)
    args = prepare_server_args([*BASE, "--enable-banyan"])
    assert not server.is_marked(args) and args.attention_backend is None
    # SGLang configures logging while it parses, so the line is on the real stderr.
    assert capsys.readouterr().err.count(f"banyan: {cpu_engine.MISSING}") == 1


@pytest.mark.parametrize("has_engine", [True, False])
def test_states_when_arguments_are_resolved_then_they_are_kept_on_a_cpu_with_the_engine_only(has_engine, monkeypatch):
    args = SimpleNamespace(**dict.fromkeys(launcher.NAMING))
    if has_engine:
        server.mark(args)
    launcher.before_resolve_once(args)
    # The hook is in the place of SGLang's function.
    assert mamba_hook._platform_supports_mamba_cache_extra_buffer() is has_engine
    assert launcher.around_platform_supports(lambda: True) is True
