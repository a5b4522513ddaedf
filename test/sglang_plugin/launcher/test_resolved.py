# SPDX-License-Identifier: Apache-2.0
"""What is known only when SGLang has resolved its arguments: refused then, in Banyan's words and before any weights."""

import importlib
import inspect
import json
import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from sglang.srt.arg_groups import mamba_hook
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.models.llama import LlamaForCausalLM, LlamaModel
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from banyan import _native, faults, patches
from banyan.layout import Layout
from banyan.layout.checkpoint import is_by_content
from banyan.refusals.models import LLAMAS, SPLIT_DRAFTS
from banyan.sglang_plugin import model_files, runtime, seams
from banyan.sglang_plugin.launcher import adapters, flags, resolved
from benchmark.modes.rows import CHAIN

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
CHUNKS = ["--chunked-prefill-size", "8192"]
WINDOWS = {"architectures": ["MellumForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="module", autouse=True)
def _plugins():
    load_plugins()
    seams.verify("main")


@pytest.fixture
def resolve(tmp_path):
    def run(*flags, **changes):
        """Resolve the arguments of a server of a tiny model that has a configuration and no weights."""
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        base = ["--model-path", str(tmp_path), "--device", "cpu", "--dp", "2", "--enable-banyan", *flags]
        args = prepare_server_args(base)
        args.resolve_once()
        return args

    return run


def refusal(capsys):
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("banyan: refused:")]
    assert len(lines) == 1
    return lines[0]


def test_model_when_it_has_full_attention_then_it_starts(resolve):
    resolve()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_arguments_when_they_are_resolved_again_then_nothing_fails_in_any_process(resolve, device):
    args, before = resolve("--device", device), faults.counts()
    args.resolve_once()
    pickle.loads(pickle.dumps(args)).resolve_once()
    assert faults.counts() == before


def test_model_when_its_pages_outlive_the_server_then_its_files_are_noted_before_they_are_loaded(resolve, tmp_path):
    weights, kept = tmp_path / "model.safetensors", tmp_path / "kept"
    weights.write_bytes(b"loaded")
    kept.mkdir()
    noted = resolve("--banyan-store", str(kept))._banyan["noted"]
    assert model_files.changed(noted) is None
    weights.write_bytes(b"others")
    assert model_files.changed(noted) == str(weights)


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ([], []),
        (["--watchdog-timeout", "61"], []),
        (["--watchdog-timeout", "60"], ["--watchdog-timeout"]),
        (
            ["--watchdog-timeout", "30", "--soft-watchdog-timeout", "5"],
            ["--watchdog-timeout", "--soft-watchdog-timeout"],
        ),
        (["--watchdog-timeout", "30", "--banyan-share", "off"], []),
    ],
)
def test_watchdog_when_a_rank_may_wait_for_longer_than_it_does_then_a_line_says_so(resolve, monkeypatch, asked, flags):
    told = Mock(wraps=resolved.logger)
    monkeypatch.setattr(resolved, "logger", told)
    resolve(*asked)
    assert [call.args[1] for call in told.warning.call_args_list] == flags


@pytest.mark.parametrize("share", ["peer", "off"])
@pytest.mark.parametrize(
    ("flags", "fitting"),
    [
        (["--chunked-prefill-size", "1000"], "992"),
        (["--device", "cuda", "--tp", "6", "--dp", "1", "--attn-dp-size", "3", *CHUNKS], "8160"),
    ],
    ids=["replicas", "ranks in step"],
)
def test_chunks_when_they_end_within_a_page_that_banyan_chose_then_refused_with_a_size_that_fits(
    resolve, capsys, flags, fitting, share
):
    with pytest.raises(SystemExit):
        resolve("--banyan-share", share, *flags)
    assert refusal(capsys).endswith(f"use --chunked-prefill-size {fitting}")
    resolve("--banyan-share", share, *flags, "--chunked-prefill-size", fitting).check_server_args()


@pytest.mark.parametrize(("chunk_tokens", "mode"), [(-1, "null"), (None, "null"), (1000, "decode")])
def test_chunks_when_sglang_makes_none_then_their_size_is_not_looked_at(chunk_tokens, mode):
    resolved._refuse_cut_pages(
        SimpleNamespace(chunked_prefill_size=chunk_tokens, disaggregation_mode=mode, page_size=16, attn_dp_size=1)
    )


ASKED = Layout(dp=1, attn_dp=2, attn_cp=1, attn_tp=4)


def settled(monkeypatch, **made):
    """What the processes are told where SGLang has made this of the flags."""
    monkeypatch.setattr(resolved, "resolved_view", lambda args: args)
    monkeypatch.setattr(flags, "layout_of", lambda view: Layout(dp=1, **made))
    return resolved._layout(None, ASKED)


def test_layout_when_sglang_divides_a_rank_by_context_then_that_is_what_its_processes_are_told(monkeypatch):
    made = {"attn_dp": 2, "attn_cp": 4, "attn_tp": 1}
    assert settled(monkeypatch, **made) == Layout(dp=1, **made)


def test_layout_when_sglang_makes_other_ranks_of_the_flags_then_refused_with_both(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        settled(monkeypatch, attn_dp=4, attn_cp=1, attn_tp=2)
    line = refusal(capsys)
    assert "2 attention DP ranks" in line and "4 attention DP ranks" in line


def test_model_when_its_configuration_cannot_be_looked_at_then_refused_and_not_shared_unseen(
    resolve, capsys, monkeypatch
):
    """SGLang's own reader of a configuration raises: Inkling's asks for what is not there before a server runs."""

    def fail(*args, **kwargs):
        raise ValueError("config namespace 'exec' not published")

    monkeypatch.setattr(resolved, "model_facts", fail)
    with pytest.raises(SystemExit):
        resolve()
    line = refusal(capsys)
    assert "ValueError: config namespace 'exec' not published" in line and "--banyan-share off" in line


def num_slots_of(args):
    return _native.RankTable.open(runtime.bookkeeping(args)["rank_table"]).num_slots


@pytest.mark.parametrize("changes, num_slots", [({}, 4), ({"sliding_window": 32, **WINDOWS}, 8)])
def test_model_when_it_has_windows_then_the_ranks_meet_where_there_is_room_for_window_pages(
    resolve, changes, num_slots
):
    assert num_slots_of(resolve(**changes)) == num_slots


@pytest.fixture
def without_windows(monkeypatch):
    """A patch of the feature does not fit."""
    patch = next(patch for patch in patches.load_queue() if patch.feature == "windows")
    monkeypatch.setattr(patches, "changed", lambda queue: [patches.Misfit(patch, patch.places[0], "it has changed")])


def test_model_when_a_feature_is_off_that_it_does_not_need_then_it_starts(resolve, without_windows):
    resolve()


def test_model_when_it_needs_a_feature_that_is_off_then_refused_by_name(resolve, without_windows, capsys):
    with pytest.raises(SystemExit):
        resolve(sliding_window=32, **WINDOWS)
    line = refusal(capsys)
    assert "MellumForCausalLM keeps a sliding window: needs Banyan's windows" in line and "--banyan-share off" in line


def test_model_when_it_has_windows_and_ranks_are_on_gpus_then_it_starts(resolve):
    assert num_slots_of(resolve("--device", "cuda", sliding_window=32, **WINDOWS)) == 8


@pytest.mark.parametrize("flags", [["--device", "cuda"], []], ids=["on a GPU", "on a CPU"])
def test_model_when_it_has_windows_and_drafts_then_it_starts(resolve, flags):
    ngrams = ("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1")
    assert resolve(*flags, *ngrams, sliding_window=32, **WINDOWS).speculative_algorithm == "NGRAM"


def test_model_when_it_has_windows_and_no_pool_of_its_kind_helps_then_the_flag_that_does_is_named(resolve, capsys):
    with pytest.raises(SystemExit) as exit_info:
        resolve("--banyan-keep-host-arena", "/dev/shm/kept", "--banyan-host-gb", "1", sliding_window=32, **WINDOWS)
    line = refusal(capsys)
    assert exit_info.value.code == 2
    assert "MellumForCausalLM" in line and "--disable-hybrid-swa-memory" in line


STATES = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    **{"head_dim": 32, "full_attention_interval": 2, "num_experts": 2, "num_experts_per_tok": 1},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}


def test_model_when_it_has_states_then_sglang_keeps_them_and_the_ranks_meet_where_there_is_room(resolve):
    assert num_slots_of(resolve(**STATES)) == 8


def test_model_when_it_has_states_and_nothing_is_shared_then_sglang_keeps_them_on_the_cpu_all_the_same(resolve):
    resolve("--banyan-share", "off", **STATES)


@pytest.mark.parametrize(
    "asked, named",
    [
        (["--mamba-radix-cache-strategy", "no_buffer"], "no_buffer"),
        (["--enable-int8-mamba-checkpoint"], "--enable-int8-mamba-checkpoint"),
    ],
)
def test_model_when_its_states_are_kept_in_another_way_then_refused_with_the_flag(resolve, capsys, asked, named):
    with pytest.raises(SystemExit):
        resolve(*asked, **STATES)
    assert named in refusal(capsys)


STATES_OF_SINGLE_TOKENS = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    **{"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "conv_L_cache": 3},
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
}


def test_model_when_no_strategy_keeps_its_states_then_the_way_out_is_one_that_starts(resolve, capsys):
    with pytest.raises(SystemExit):
        resolve(**STATES_OF_SINGLE_TOKENS)
    line = refusal(capsys)
    assert "use --banyan-share off" in line and "--mamba-radix-cache-strategy" not in line
    assert resolved_view(resolve("--banyan-share", "off", **STATES_OF_SINGLE_TOKENS)).page_size == 1


def test_model_when_it_makes_vectors_or_rewards_then_it_starts(resolve):
    resolve("--is-embedding")
    resolve(architectures=["LlamaForSequenceClassification"])


@pytest.fixture
def tenants(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    return ["--banyan-tenant-secret-file", str(secret)]


@pytest.mark.parametrize("architecture", ["LlamaForSequenceClassification", "LlamaEmbeddingModel"])
def test_model_when_it_makes_vectors_or_rewards_unasked_then_it_cannot_keep_tenants_apart(
    resolve, capsys, tenants, architecture
):
    with pytest.raises(SystemExit):
        resolve(*tenants, architectures=[architecture])
    assert "--banyan-tenant-secret-file with --is-embedding, or a model for vectors" in refusal(capsys)


def test_model_when_it_generates_then_it_can_keep_tenants_apart(resolve, tenants):
    resolve(*tenants)


@pytest.mark.parametrize("spelling", [["--enable-dp-attention"], ["--dp", "1", "--attn-dp-size", "2"]])
def test_model_when_it_is_a_llama_and_ranks_step_together_on_the_cpu_then_refused_by_its_name(
    resolve, capsys, spelling
):
    with pytest.raises(SystemExit):
        resolve("--tp", "2", *spelling)
    line = refusal(capsys)
    assert "LlamaForCausalLM" in line and "use --dp N alone" in line
    resolve("--tp", "2")


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    **{"head_dim": 32, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
}


@pytest.fixture
def draft(tmp_path):
    def of(architecture):
        """Flags that name a draft of this architecture."""
        folder = tmp_path / "draft"
        folder.mkdir(exist_ok=True)
        config = {**LLAMA, "num_hidden_layers": 1, "draft_vocab_size": 256, "architectures": [architecture]}
        (folder / "config.json").write_text(json.dumps(config))
        algorithm = "EAGLE3" if architecture.endswith("3") else "EAGLE"
        return ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(folder), *CHAIN]

    return of


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_draft_when_it_is_divided_as_its_model_and_ranks_step_together_then_it_starts(resolve, draft, device):
    flags = ["--tp", "2", "--enable-dp-attention", "--device", device, *draft("LlamaForCausalLMEagle3")]
    assert resolve(*flags, **MOE).speculative_algorithm == "EAGLE3"


@pytest.mark.parametrize("model, ahead", [(MOE, 1), (STATES, 0)], ids=["pages", "pages and states"])
def test_draft_when_it_is_of_eagles_kind_then_all_processes_are_told_what_sglang_makes_keys_of(
    resolve, draft, monkeypatch, model, ahead
):
    # As on a machine with a GPU.
    monkeypatch.setattr(mamba_hook, "_platform_supports_mamba_cache_extra_buffer", lambda: True)
    args = resolve("--device", "cuda", *draft("LlamaForCausalLMEagle3"), **model)
    assert pickle.loads(pickle.dumps(args))._banyan["tokens_ahead"] == ahead


def test_draft_when_its_vocabulary_is_divided_and_ranks_step_together_on_the_cpu_then_refused_by_its_name(
    resolve, draft, capsys
):
    with pytest.raises(SystemExit):
        resolve("--tp", "2", "--enable-dp-attention", *draft("LlamaForCausalLMEagle"), **MOE)
    line = refusal(capsys)
    assert "LlamaForCausalLMEagle" in line and "--speculative-draft-model-path" in line and "EAGLE3" in line
    resolve("--tp", "2", *draft("LlamaForCausalLMEagle"), **MOE)


def test_draft_when_it_has_a_layer_for_each_step_and_is_another_model_then_refused_by_its_path(resolve, draft, capsys):
    """SGLang hands a linker the pools of several drafts only where they are further layers of the model."""
    with pytest.raises(SystemExit):
        resolve("--enable-multi-layer-eagle", *draft("LlamaForCausalLMEagle"))
    line = refusal(capsys)
    assert "--enable-multi-layer-eagle with --speculative-draft-model-path" in line and "--banyan-share off" in line


@pytest.mark.parametrize("module", ["llama_eagle", "mimo_mtp", "qwen2_eagle"])
def test_draft_when_upstream_divides_its_vocabulary_no_more_then_the_refusal_can_go(module):
    source = inspect.getsource(importlib.import_module(f"sglang.srt.models.{module}"))
    assert "use_attn_tp_group" not in source and "get_embedding_tp_kwargs" not in source
    assert any(f"class {name}(" in source for name in SPLIT_DRAFTS)


def test_llama_when_upstream_divides_its_vocabulary_no_more_then_the_refusal_can_go():
    assert "use_attn_tp_group" not in inspect.getsource(LlamaModel.__init__)
    for module in ("mistral", "ministral3", "teleflm"):
        importlib.import_module(f"sglang.srt.models.{module}")
    heirs = {heir.__name__ for heir in LlamaForCausalLM.__subclasses__()}
    assert heirs >= {f"{name}ForCausalLM" for name in LLAMAS if name != "Llama"}


BRANCHES = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"]
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 32}


@pytest.mark.parametrize(
    "asked",
    [[], ["--disable-hybrid-swa-memory"], ["--page-size", "32"]],
    ids=["apart", "kept in full", "pages of the user's"],
)
@pytest.mark.parametrize("model", [{**WINDOWS, "sliding_window": 32}, GEMMA], ids=["windows", "one pool"])
def test_drafts_when_their_branches_cannot_be_verified_over_windows_then_refused_and_not_at_the_first_request(
    resolve, draft, capsys, asked, model
):
    flags = ["--device", "cuda", "--attention-backend", "fa3", *draft("LlamaForCausalLMEagle3"), *BRANCHES, *asked]
    with pytest.raises(SystemExit):
        resolve(*flags, **model)
    assert "--speculative-eagle-topk 4" in refusal(capsys)


def test_drafts_when_their_branches_cannot_be_verified_over_windows_and_nothing_is_shared_then_pages_of_one_token(
    resolve, draft
):
    flags = ["--device", "cuda", "--attention-backend", "fa3", *draft("LlamaForCausalLMEagle3"), *BRANCHES]
    made = resolve("--banyan-share", "off", *flags, sliding_window=32, **WINDOWS)
    assert resolved_view(made).page_size == 1


def test_drafts_when_they_have_branches_and_the_model_no_windows_then_it_starts(resolve, draft):
    resolve("--device", "cuda", "--attention-backend", "fa3", *draft("LlamaForCausalLMEagle3"), *BRANCHES)


def test_model_when_its_windows_are_kept_in_full_then_it_starts(resolve):
    resolve("--disable-hybrid-swa-memory", sliding_window=32, **WINDOWS)


def test_adapter_when_its_folder_has_another_content_then_its_id_is_another_and_the_flags_stay(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"target_modules": ["q_proj"], "r": 4}))
    told, noted = [], []
    for weights in (b"one", b"other", b"one"):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        flags = ["--enable-lora", "--lora-paths", f"a={tmp_path}", "--max-lora-rank", "4"]
        flags += ["--lora-target-modules", "q_proj", "--lora-backend", "torch_native"]
        args = prepare_server_args(["--model-path", str(tmp_path), "--device", "cpu", "--enable-banyan", *flags])
        args.resolve_once()
        args.check_server_args()
        # As a process that SGLang starts sees it.
        (adapter,) = resolved_view(pickle.loads(pickle.dumps(args))).lora_paths
        assert (adapter.lora_name, adapter.lora_path) == ("a", str(tmp_path))
        told.append(adapter.lora_id)
        noted = args._banyan["noted"]
    assert model_files.changed(noted) is None
    (tmp_path / "adapter_model.safetensors").write_bytes(b"another")
    assert model_files.changed(noted) == str(tmp_path / "adapter_model.safetensors")
    assert told[0] == told[2] != told[1] and is_by_content(told[0])


def test_adapter_when_another_one_brings_more_modules_then_its_id_is_another(tmp_path):
    """SGLang applies what matches a module that any of the adapters is for, or else those of --lora-target-modules."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name, modules in (("a", ["q_proj"]), ("same", ["q_proj"]), ("more", ["q_proj", "o_proj"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"target_modules": modules, "r": 4}))
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode())

    def told(names, *flags):
        paths = [f"{name}={tmp_path / name}" for name in names]
        flags = [
            "--enable-lora",
            "--lora-paths",
            *paths,
            "--max-lora-rank",
            "4",
            "--lora-backend",
            "torch_native",
            *flags,
        ]
        args = prepare_server_args(["--model-path", str(tmp_path), "--device", "cpu", "--enable-banyan", *flags])
        args.resolve_once()
        args.check_server_args()
        return resolved_view(args).lora_paths[0].lora_id

    alone = told(["a"])
    assert is_by_content(alone) and told(["a", "same"]) == alone
    assert told(["a", "more"]) != alone != told(["a"], "--lora-target-modules", "q_proj", "o_proj")


def test_adapter_when_it_is_not_here_yet_then_sglang_names_it_and_the_log_says_so(tmp_path, caplog):
    adapter = LoRARef(lora_id="0f" * 16, lora_name="a", lora_path=str(tmp_path / "nowhere"))
    assert adapters._told(adapter, ()) is adapter
    assert "neither kept nor stored" in caplog.text


def test_refusal_when_a_backend_that_sglang_chose_costs_the_cache_then_the_flag_is_named():
    view = SimpleNamespace(
        enable_deterministic_inference=True,
        attention_backend="flashinfer",
        prefill_attention_backend=None,
        decode_attention_backend=None,
    )
    assert resolved._asked(view) == "--enable-deterministic-inference with the attention backend flashinfer"


def test_model_when_sglang_keeps_no_radix_cache_for_it_then_refused_by_its_name(resolve, capsys):
    whisper = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "is_encoder_decoder": True,
    }
    with pytest.raises(SystemExit):
        resolve(**whisper)
    line = refusal(capsys)
    assert "WhisperForConditionalGeneration" in line and "--banyan-share off" in line


def test_flags_when_sharing_is_off_then_nothing_is_refused(resolve):
    resolve("--banyan-share", "off", sliding_window=32, **WINDOWS)
