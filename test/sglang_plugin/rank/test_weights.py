# SPDX-License-Identifier: Apache-2.0
"""Weights that change, change in part, or change under pages in use: nothing of before is shared with what comes after.

The functions of SGLang are stood in for; the hooks on them are those of the patch queue.
"""

import hashlib
import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_linker import PAGE, make_rank, transfer
from test.unit.directory.rig import keys

from banyan import _native, config
from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import identity, weights
from banyan.sglang_plugin.rank import linker as module
from banyan.sglang_plugin.rank.weights_content import FAILED, UNKNOWN

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
DONE = SimpleNamespace(success=True, message="")
FAILURE = SimpleNamespace(success=False, message="half of it")
COMMANDS = {
    "update_weights_from_disk": UpdateWeightFromDiskReqInput,
    "update_weights_from_distributed": UpdateWeightsFromDistributedReqInput,
    "update_weights_from_tensor": UpdateWeightsFromTensorReqInput,
    "update_weights_from_ipc": UpdateWeightsFromIPCReqInput,
    "begin_weight_update": BeginWeightUpdateReqInput,
    "end_weight_update": EndWeightUpdateReqInput,
    "check_weights": CheckWeightsReqInput,
}
LOADERS = [name for name in COMMANDS if name.startswith("update_weights")]
SAME, OTHER = bytes([1] * 32), bytes([2] * 32)


WITHIN_A_SESSION = ("update_weights_from_distributed", "update_weights_from_tensor")


def begin(ranks, call, loader):
    """What SGLang wants before such a loader."""
    for linker, *_ in ranks if loader in WITHIN_A_SESSION else ():
        call(linker, "begin_weight_update")


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(weights, "own_digest", lambda updater: SAME)
    monkeypatch.setattr(weights, "agreed_digest", lambda own, group: own)
    rank_table = _native.RankTable.create(2)
    return [make_rank(monkeypatch, rank_table, rank, Config(min_fetch_tokens=PAGE, host_gb=0.0)) for rank in (0, 1)]


@pytest.fixture
def call(monkeypatch):
    """Calls a method of SGLang's updater on one rank; ``flushes``: as a loader does that succeeds."""

    def run(linker, method, result=DONE, flushes=False, **fields):
        usual = {"load_format": None} if method == "update_weights_from_tensor" else {}
        monkeypatch.setattr(module, "_installed", linker)
        flush = hooked(UPDATER + "flush_cache_after_weight_update", lambda *args: None)

        def body(*args):
            if flushes:
                flush(None, None, result.success, result.message)
            return result

        command = Mock(spec=COMMANDS[method], **usual | fields)
        return hooked(UPDATER + method, body)(SimpleNamespace(tp_cpu_group=None), command)

    return run


def share(owner, pages, number):
    """Compute one page on a rank; its slots."""
    slots = pages.alloc(PAGE)
    owner.offload(transfer(keys(number), slots))
    return slots


def finds(reader, number):
    return reader.lookup(f"request {number}", transfer(keys(number), None)) != []


def test_weights_when_a_trainer_writes_them_without_a_loader_then_old_pages_meet_no_new_ones(ranks, call):
    (owner, _, pages), (reader, *_) = ranks
    slots = share(owner, pages, 1)
    assert finds(reader, 1)
    for linker in (owner, reader):
        call(linker, "begin_weight_update")
    assert not finds(reader, 1)
    pages.free(slots)
    owner.reset()
    between = share(owner, pages, 2)
    pages.free(between)
    for linker in (owner, reader):
        call(linker, "end_weight_update")
    assert not finds(reader, 2)
    share(owner, pages, 3)
    assert finds(reader, 3)


def test_weights_when_a_session_is_open_then_neither_an_idle_nor_a_flushed_rank_lends_what_it_computes(ranks, call):
    """A trainer may have written this rank's, and not yet the other's."""
    (owner, _, pages), (reader, *_) = ranks
    for linker in (owner, reader):
        call(linker, "begin_weight_update")
    for number in (1, 2):
        slots = share(owner, pages, number)
        assert not finds(reader, number)
        pages.free(slots)
        owner.reset()
    slots = share(owner, pages, 3)
    for linker in (owner, reader):
        call(linker, "end_weight_update")
    slots = [slots, share(owner, pages, 4)]
    assert not finds(reader, 4)
    for some in slots:
        pages.free(some)
    owner.reset()
    share(owner, pages, 5)
    assert finds(reader, 5)


@pytest.mark.parametrize("loader", WITHIN_A_SESSION)
def test_weights_when_sglang_refuses_a_loader_outside_a_session_then_they_are_those_of_before(ranks, call, loader):
    """It comes to all ranks: none would share again where no update comes from disk."""
    (owner, _, pages), (reader, *_) = ranks
    call(owner, loader, FAILURE)
    share(owner, pages, 1)
    assert finds(reader, 1)


@pytest.mark.parametrize("loader", LOADERS)
def test_weights_when_a_loader_fails_on_one_rank_then_it_shares_with_nobody(ranks, call, loader):
    (owner, _, pages), (reader, *_) = ranks
    begin(ranks, call, loader)
    assert call(owner, loader, FAILURE) is FAILURE
    share(owner, pages, 2)
    assert not finds(reader, 2)
    call(reader, loader, flushes=True)
    share(owner, pages, 1)
    assert not finds(reader, 1)


def test_weights_when_the_draft_s_fail_behind_the_model_s_then_the_rank_shares_with_nobody(ranks, call):
    (owner, _, pages), (reader, *_) = ranks
    call(owner, "update_weights_from_disk", FAILURE, flushes=True)
    call(reader, "update_weights_from_disk", flushes=True)
    share(owner, pages, 1)
    assert not finds(reader, 1)


@pytest.mark.parametrize("loader", LOADERS)
def test_weights_when_loaded_after_a_failure_then_only_all_of_them_lead_back(ranks, call, loader):
    (owner, _, pages), (reader, *_) = ranks
    call(owner, loader, FAILURE)
    call(reader, loader, flushes=True)
    for linker in (owner, reader):
        call(linker, loader, flushes=True)
    share(owner, pages, 1)
    assert finds(reader, 1) is (loader == "update_weights_from_disk")


@pytest.mark.parametrize("result", [DONE, FAILURE])
def test_weights_when_a_check_resets_them_then_the_rank_shares_with_nobody_until_all_are_loaded(ranks, call, result):
    (owner, _, pages), (reader, *_) = ranks
    slots = share(owner, pages, 1)
    call(owner, "check_weights", action="checksum")
    assert finds(reader, 1)
    for linker in (owner, reader):
        call(linker, "check_weights", result, action="reset_tensors")
    pages.free(slots)
    owner.reset()
    slots = share(owner, pages, 2)
    assert not finds(reader, 2)
    for linker in (owner, reader):
        call(linker, "update_weights_from_disk", flushes=True)
    pages.free(slots)
    owner.reset()
    share(owner, pages, 3)
    assert finds(reader, 3)


@pytest.mark.parametrize(("before", "left"), [(SAME, OTHER), (UNKNOWN, UNKNOWN)], ids=["noise", "nobody can tell"])
def test_weights_when_a_check_has_reset_what_no_load_brings_back_then_the_rank_shares_with_nobody(
    ranks, call, monkeypatch, before, left
):
    """Buffers that no file has; each rank has other noise in them."""
    (owner, _, pages), (reader, *_) = ranks
    monkeypatch.setattr(weights, "own_digest", lambda updater: before)
    for linker in (owner, reader):
        call(linker, "check_weights", action="reset_tensors")
    monkeypatch.setattr(weights, "own_digest", lambda updater: left)
    for linker in (owner, reader):
        call(linker, "check_weights", action="reset_tensors")
        call(linker, "update_weights_from_disk", flushes=True)
    share(owner, pages, 1)
    assert not finds(reader, 1)


@pytest.fixture
def told(monkeypatch):
    """What a shard has told the others, and what all have agreed on."""
    told, agreed = [], []
    monkeypatch.setattr(weights, "agreed_digest", lambda own, group: told.append(own) or (agreed or told)[-1])
    return told, agreed


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("at_reader", [FAILED, UNKNOWN], ids=["failed there too", "there not"])
def test_weights_when_a_loader_fails_on_another_shard_then_this_one_shares_with_nobody(
    ranks, call, told, monkeypatch, loader, knows, at_reader
):
    """The rank computes with both: the other shard's peer would fetch what this one has of it."""
    monkeypatch.setattr(Config, "knows_weights", knows)
    (owner, _, pages), (reader, *_) = ranks
    for linker, agreed in ((owner, FAILED), (reader, at_reader)):
        told[1][:] = [agreed]
        call(linker, loader, flushes=True)
    share(owner, pages, 1)
    assert not finds(reader, 1) and FAILED not in told[0]


@pytest.mark.parametrize("method", [*LOADERS, "end_weight_update"])
def test_shards_when_banyan_fails_on_one_of_them_then_it_tells_the_others_all_the_same(ranks, call, told, method):
    def fails(*args):
        raise OSError("too many open files")

    (owner, *_), _ = ranks
    owner.weights_changed = fails
    with pytest.raises(OSError, match="open files"):
        call(owner, method)
    assert told[0] == [UNKNOWN]


@pytest.mark.parametrize(("result", "tells"), [(DONE, UNKNOWN), (FAILURE, FAILED)], ids=["done", "failed"])
def test_shards_when_one_of_them_is_off_then_it_tells_the_others_all_the_same(
    ranks, call, told, monkeypatch, result, tells
):
    monkeypatch.setattr(runtime, "is_sharing", lambda: False)
    for loader in LOADERS:
        assert call(None, loader, result) is result
    call(None, "end_weight_update", result)
    assert told[0] == [tells] * len(LOADERS) + [UNKNOWN]
    monkeypatch.setattr(runtime, "config", lambda: Config(share="off"))
    call(None, "update_weights_from_disk", result)
    assert len(told[0]) == len(LOADERS) + 1


@pytest.mark.parametrize("loader", LOADERS)
def test_weights_when_every_rank_takes_the_same_then_they_share_again(ranks, call, loader):
    (owner, _, pages), (reader, *_) = ranks
    for linker in (owner, reader):
        call(linker, loader, flushes=True)
    share(owner, pages, 1)
    assert finds(reader, 1)


@pytest.mark.parametrize("loader", LOADERS)
def test_weights_when_a_loader_tells_nobody_that_it_has_succeeded_then_old_pages_meet_no_new_ones(ranks, call, loader):
    (owner, _, pages), (reader, *_) = ranks
    share(owner, pages, 1)
    call(reader, loader)
    assert not finds(reader, 1)


@pytest.fixture
def servers(ranks, call, monkeypatch):
    """The ranks are of two servers, whose pages meet elsewhere too; takes an update with what its bytes are on each."""
    monkeypatch.setattr(Config, "knows_weights", True)
    for linker, *_ in ranks:
        linker.kinds.full._identity._server = f"server {id(linker)}"
    told = []
    monkeypatch.setattr(weights, "own_digest", lambda updater: told[0])

    def take(loader, *digests, result=DONE, **fields):
        for (linker, *_), digest in zip(ranks, digests, strict=True):
            told[:] = [digest]
            call(linker, loader, result, flushes=loader in LOADERS, **fields)

    return take


def take_whole(servers, loader, *digests, **fields):
    """With all that SGLang, or a trainer, does before."""
    if loader == "end_weight_update":
        servers("begin_weight_update", *digests)
        servers("update_weights_from_tensor", *digests, **fields)
    servers(loader, *digests)


COMPLETE = ("update_weights_from_disk", "update_weights_from_ipc", "end_weight_update")


@pytest.mark.parametrize("loader", COMPLETE)
@pytest.mark.parametrize(("on_both", "finds_it"), [((SAME, SAME), True), ((SAME, OTHER), False)])
def test_weights_when_two_servers_take_an_update_then_they_share_where_its_bytes_are_the_same(
    ranks, servers, loader, on_both, finds_it
):
    (owner, _, pages), (reader, *_) = ranks
    slots = share(owner, pages, 1)
    assert finds(reader, 1)
    take_whole(servers, loader, *on_both)
    assert not finds(reader, 1)
    pages.free(slots)
    owner.reset()
    share(owner, pages, 2)
    assert finds(reader, 2) is finds_it


@pytest.mark.parametrize("loader", COMPLETE)
def test_weights_when_a_shard_cannot_tell_its_bytes_then_servers_share_nothing(ranks, servers, loader):
    (owner, _, pages), (reader, *_) = ranks
    take_whole(servers, loader, UNKNOWN, UNKNOWN)
    share(owner, pages, 1)
    assert not finds(reader, 1)


def test_weights_when_an_update_has_failed_then_a_session_s_end_names_none_and_one_from_disk_does(ranks, servers):
    (owner, _, pages), (reader, *_) = ranks
    servers("update_weights_from_disk", SAME, SAME, result=FAILURE)
    take_whole(servers, "end_weight_update", SAME, SAME)
    slots = share(owner, pages, 1)
    assert not finds(reader, 1)
    servers("update_weights_from_disk", SAME, SAME)
    pages.free(slots)
    owner.reset()
    share(owner, pages, 2)
    assert finds(reader, 2)


@pytest.mark.parametrize(
    "commands",
    [
        ["begin_weight_update", "update_weights_from_disk"],
        ["begin_weight_update", "update_weights_from_ipc"],
        ["begin_weight_update", "end_weight_update"],
    ],
    ids=["a session is open", "a session is open for IPC", "a trainer has written them past the loaders"],
)
def test_weights_when_they_are_not_all_that_is_computed_with_then_they_are_not_named_by_their_bytes(
    ranks, servers, commands
):
    (owner, _, pages), (reader, *_) = ranks
    for command in commands:
        servers(command, SAME, SAME)
    share(owner, pages, 1)
    assert not finds(reader, 1)


@pytest.mark.parametrize("load_format", ["direct", "a.loader"])
def test_weights_when_they_went_past_the_model_then_they_have_no_name_until_all_come_from_disk(
    ranks, servers, load_format
):
    """What it has derived from those before, no later session need bring."""
    (owner, _, pages), (reader, *_) = ranks
    for past in ({"load_format": load_format}, {}):
        take_whole(servers, "end_weight_update", SAME, SAME, **past)
        slots = share(owner, pages, 1)
        assert not finds(reader, 1)
        pages.free(slots)
        owner.reset()
    servers("update_weights_from_disk", SAME, SAME)
    share(owner, pages, 2)
    assert finds(reader, 2)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_weights_when_the_model_s_own_loader_took_them_then_they_are_named_by_their_bytes(ranks, servers, load_format):
    (owner, _, pages), (reader, *_) = ranks
    take_whole(servers, "end_weight_update", SAME, SAME, load_format=load_format)
    share(owner, pages, 1)
    assert finds(reader, 1)


def test_weights_when_they_change_again_then_not_those_that_were_named(ranks, servers):
    """A session begins: a trainer may write what no loader sees."""
    (owner, _, pages), (reader, *_) = ranks
    servers("update_weights_from_disk", SAME, SAME)
    share(owner, pages, 1)
    assert finds(reader, 1)
    servers("begin_weight_update", SAME, SAME)
    assert not finds(reader, 1)


def test_weights_when_they_change_under_a_request_then_its_pages_are_published_after_a_flush_only(ranks, call, caplog):
    (owner, _, pages), (reader, *_) = ranks
    begun = share(owner, pages, 1)
    for linker in (owner, reader):
        call(linker, "update_weights_from_tensor", flushes=True)
    grown = share(owner, pages, 2)
    assert owner.num_completed_offloads() == 2
    assert not finds(reader, 2)
    assert caplog.text.count("until its cache is flushed") == 1
    for slots in (begun, grown):
        pages.free(slots)
    owner.reset()
    share(owner, pages, 3)
    assert finds(reader, 3)


def test_weights_when_a_rank_cannot_join_again_then_it_shares_nothing_and_its_pool_goes_on(ranks, call, monkeypatch):
    def fails(*args):
        raise OSError("too many open files")

    (owner, _, pages), (reader, *_) = ranks
    slots = share(owner, pages, 1)
    monkeypatch.setattr(owner.kinds.full.access, "join", fails)
    with pytest.raises(OSError, match="open files"):
        call(owner, "update_weights_from_tensor", flushes=True)
    # As a hook's failure does.
    owner.stop()
    pages.free(slots)
    owner.reset()
    assert not finds(reader, 1) and owner.state()["num_published_pages"] == 0
    assert pages.alloc(pages.available_size()) is not None


def asked(**flags):
    """Arguments that ask for nothing but ``flags``."""
    usual = {"json_model_override_args": "{}", "dtype": "auto", "quantization": None, "quantization_param_path": None}
    backends = dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"))
    return SimpleNamespace(**usual | backends | identity.USUAL | flags)


def digest(kv_dtype="torch.bfloat16", **flags):
    return identity._config_digest(asked(**flags), kv_dtype)


@pytest.mark.parametrize(
    "flag", ["quantization_param_path", "decrypted_config_file", "decrypted_draft_config_file", "rl_quant_profile"]
)
def test_namespace_when_a_file_that_a_flag_names_says_something_else_then_another_one(tmp_path, flag):
    digests = []
    for name, text in (("a", "1.0"), ("b", "1.0"), ("b", "2.0")):
        (tmp_path / name).write_text(text)
        digests.append(identity._config_digest(asked(**{flag: str(tmp_path / name)}), "torch.bfloat16"))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "flags",
    [
        {"modelopt_quant": "fp8"},
        {"load_format": "flash_rl"},
        {"model_loader_extra_config": '{"qlora_adapter_name_or_path": "a"}'},
        {"model_impl": "transformers"},
        {"model_config_parser": "mistral"},
        {"context_length": 4096},
        {"flashinfer_mxfp4_moe_precision": "fp8"},
        {"forward_hooks": [{"name": "steering"}]},
    ],
)
def test_namespace_when_a_flag_changes_what_is_computed_then_another_one(flags):
    assert digest(**flags) != digest()


@pytest.mark.parametrize("name", config.OF_COMPUTING)
def test_namespace_when_a_setting_changes_what_is_computed_then_another_one(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    usual = digest()
    monkeypatch.setenv(name, "lm_head")
    assert digest() != usual


def test_namespace_when_fp8_is_written_without_its_scales_then_another_one():
    for flag in ("attention_backend", "prefill_attention_backend"):
        assert digest("torch.float8_e4m3fn", **{flag: "torch_native"}) != digest("torch.float8_e4m3fn")
        assert digest("torch.float8_e4m3fn", **{flag: "fa3"}) == digest("torch.float8_e4m3fn")
        assert digest(**{flag: "torch_native"}) == digest()


def test_namespace_when_nothing_unusual_is_asked_then_that_of_a_release_that_knew_fewer_flags():
    text = json.dumps(["{}", "auto", None])
    assert digest() == hashlib.sha256(text.encode()).hexdigest()


def computing(monkeypatch, *adapters, engine="e", **flags):
    """By what a server with these is known to the other one of a pair."""
    loaded = [SimpleNamespace(lora_id=adapter) for adapter in adapters]
    monkeypatch.setattr(identity, "get_lora", lambda: SimpleNamespace(lora_paths=loaded or None))
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    args = asked(model_path="m", revision=None, **flags)
    pools = SimpleNamespace(pool=SimpleNamespace(dtype="torch.bfloat16"), drafts=(), identity=())
    made = identity.Identity(args, Config(store=("/kv",)), pools, {"server": "s", "engine": engine, "noted": []})
    return made.computing(made.weights_sha256)


ADAPTERS = tuple("banyan-adapter-" + letter * 64 for letter in "ab")


@pytest.mark.parametrize(
    ("adapters", "flags"),
    [
        ((), {}),
        (ADAPTERS[1:], {}),
        (ADAPTERS, {}),
        (ADAPTERS[:1], {"json_model_override_args": '{"rope_theta": 1}'}),
        (ADAPTERS[:1], {"engine": "another"}),
    ],
    ids=["without it", "another of its name", "more", "overrides", "another engine"],
)
def test_pair_when_its_servers_have_other_adapters_flags_or_code_then_they_are_not_the_same(
    monkeypatch, adapters, flags
):
    assert computing(monkeypatch, *adapters, **flags) != computing(monkeypatch, *ADAPTERS[:1])


def test_pair_when_its_servers_have_the_same_adapters_then_neither_order_nor_later_ones_matter(monkeypatch):
    assert computing(monkeypatch, *ADAPTERS) == computing(monkeypatch, "f" * 32, *reversed(ADAPTERS))


def test_namespace_when_weights_are_only_read_in_another_way_then_the_same():
    names = {"weight_loader_disable_mmap", "download_dir", "model_path", "kv_cache_dtype", "max_total_tokens"}
    assert not names & identity.USUAL.keys()
