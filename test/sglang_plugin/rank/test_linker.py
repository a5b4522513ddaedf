# SPDX-License-Identifier: Apache-2.0
"""The linker as SGLang drives it, two ranks in one process: offload, lookup, load, start, wait, finish, updates."""

import gc
import json
import math
import shutil
import tempfile
import time
from array import array
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest
import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from test.sglang_plugin.rank.matched import Matched
from test.sglang_plugin.rank.reporting.test_line_report import chat
from test.sglang_plugin.rank.reporting.test_line_report import request as chat_request
from test.unit.directory.rig import keys

from banyan import _native
from banyan.arena.page_source import all_that_is_found
from banyan.cache import NOTHING_QUEUED
from banyan.config import Config
from banyan.core import SourceKind, rid_of
from banyan.layout import Layout
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.host_pool import SharedMHAPool
from banyan.sglang_plugin.rank import entry, identity, kind, own_slots, tier
from banyan.sglang_plugin.rank import linker as module
from banyan.sglang_plugin.rank.linker import BanyanLinker
from banyan.sglang_plugin.rank.reporting import figures, report
from banyan.sglang_plugin.rank.shards import Shards
from banyan.telemetry import SERIES, Parting, Pseudonyms, rid_pseudonym
from banyan.telemetry.gauges import GAUGES

PAGE, TOKENS, LAYERS = 4, 64, 3
POOL = {
    "size": TOKENS,
    "page_size": PAGE,
    "layer_num": LAYERS,
    "device": "cpu",
    "enable_memory_saver": False,
    "head_num": 2,
    "head_dim": 8,
    "enable_alt_stream": False,
    "dtype": torch.bfloat16,
}
LAYOUT = Layout(dp=2, attn_dp=1, attn_cp=1, attn_tp=1)
SERVER = SimpleNamespace(
    page_size=PAGE,
    enable_metrics=False,
    model_path="a-model",
    revision=None,
    weight_version="1",
    **identity.USUAL,
    json_model_override_args="{}",
    dtype="bfloat16",
    quantization=None,
    chunked_prefill_size=None,
    base_gpu_id=0,
    gpu_id_step=1,
    quantization_param_path=None,
    enable_lora=None,
    lora_paths=None,
    attention_backend=None,
    prefill_attention_backend=None,
    decode_attention_backend=None,
)


SCHEDULE = SimpleNamespace(chunked_prefill_size=4, max_prefill_tokens=64)
"""As SGLang has resolved it; ``SERVER`` is what the user said."""

SPECULATION = SimpleNamespace(
    speculative_algorithm="EAGLE",
    speculative_draft_model_path="a-draft",
    speculative_draft_model_revision="main",
    speculative_draft_model_quantization=None,
)


def be_rank(monkeypatch, rank, shard=0):
    parallel = SimpleNamespace(
        dp_rank=rank,
        tp_rank=shard,
        dp_size=2,
        attn_dp_size=1,
        attn_cp_size=1,
        nnodes=1,
        node_rank=0,
        attn_cp_rank=0,
        attn_tp_size=LAYOUT.attn_tp,
        attn_tp_rank=shard,
        dcp_enabled=False,
    )
    monkeypatch.setattr(figures, "HISTORY_SHARE", math.inf)
    for user in (module, own_slots, identity):
        monkeypatch.setattr(user, "get_parallel", lambda: parallel)
    monkeypatch.setattr(kind, "get_schedule", lambda: SCHEDULE)
    monkeypatch.setattr(identity, "get_spec", lambda: SPECULATION)
    monkeypatch.setattr(identity, "get_lora", lambda: SimpleNamespace(lora_paths=None))


def carried(rank_table):
    named = {"server": "s", "engine": "e"}
    return {"rank_table": rank_table.path, **named, "layout": LAYOUT, "noted": [], "tokens_ahead": 0}


def make_pool():
    """A small pool of keys and values, with something in it."""
    pool = SharedMHAPool(**POOL)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    return pool


def parameters_of(allocator, page_tokens, *, disable=False, drafts=(), has_events=False, **others):
    """What SGLang hands to a linker."""
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        page_size=page_tokens,
        attn_tp_cache_group=None,
        attn_cp_cache_group=None,
        disable=disable,
        is_eagle=False,
        enable_kv_cache_events=has_events,
        mtp_draft_device_pools=(),
        mtp_draft_mamba_pools=(),
        sidecar_draft_device_pools=drafts,
        **others,
    )


def be_started(monkeypatch, rank_table, rank, config, *, shard=0, **told):
    """This process is the one of a rank, of a server with these flags. As what its hooks are verified from now on.
    ``told``: by the main process, beside what it tells of every model."""
    verified = []
    be_rank(monkeypatch, rank, shard)
    monkeypatch.setattr(module.seams, "verify", verified.append)
    monkeypatch.setattr(report, "start", lambda *args, **kwargs: None)
    monkeypatch.setattr(runtime, "config", lambda: config)
    monkeypatch.setattr(runtime, "disaggregation_mode", lambda: "null")
    monkeypatch.setattr(runtime, "bookkeeping", lambda args: {**carried(rank_table), **told})
    return verified


def make_rank(
    monkeypatch,
    rank_table,
    rank,
    config,
    *,
    disable=False,
    make_pool=make_pool,
    drafts_of=lambda pool: (),
    has_events=False,
):
    verified = be_started(monkeypatch, rank_table, rank, config)
    pool = make_pool()
    allocator = QuarantiningAllocator(
        size=pool.size, page_size=pool.page_size, dtype=torch.bfloat16, device="cpu", kvcache=pool, need_sort=False
    )
    drafts = drafts_of(pool)
    params = parameters_of(allocator, pool.page_size, disable=disable, drafts=drafts, has_events=has_events)
    built = BanyanLinker(SERVER, params, components={ComponentType.FULL}, extra_config={})
    assert verified == ["scheduler"], "whoever lacks a hook that is needed must share nothing"
    return built, pool, allocator


@pytest.fixture(params=[0.0, 0.001, None], ids=["pools", "pools and arena", "arena sized at the start"])
def ranks(monkeypatch, request):
    config = Config(min_fetch_tokens=PAGE, host_gb=request.param)
    rank_table = _native.RankTable.create(4)
    return rank_table, [make_rank(monkeypatch, rank_table, rank, config) for rank in (0, 1)]


def transfer(names, slots):
    return [SimpleNamespace(keys=names, device_indices=slots)]


def page(pool, slots):
    return torch.stack([buffer[slots] for buffer in (*pool.k_buffer, *pool.v_buffer)])


def test_prefix_when_one_rank_offloads_it_then_the_other_loads_the_same_bytes(ranks):
    _, ((owner, pool, pages), (reader, own_pool, own_pages)) = ranks
    names, slots = keys(1, 2), pages.alloc(2 * PAGE)
    assert owner.offload(transfer(names, slots)) and owner.num_completed_offloads() == 1
    assert owner.pop_completed_offload()
    assert reader.lookup("r", transfer(names, None)) == [2]
    assert reader.cache.copies_of([names[1], keys(3)[0]]) == [SourceKind.PEER, None]
    assert owner.cache.copies_of([names[1]])[0] in (None, SourceKind.HOST), "its own pool is no other copy"
    targets = own_pages.alloc(2 * PAGE)
    assert reader.load("r", transfer(names, targets))
    index = reader.start_layer_wise_loading()
    reader.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        reader.layer_done_counter.wait_until(layer)
    assert reader.finish_layer_wise_loading(index)
    assert torch.equal(page(own_pool, targets), page(pool, slots))
    assert own_pages.available_size() == TOKENS - 2 * PAGE


@pytest.mark.parametrize("num_shards", [1, 2])
def test_offload_when_sharing_has_stopped_in_one_shard_then_the_others_go_on_with_their_nodes(
    ranks, monkeypatch, num_shards
):
    """SGLang commits as many as every shard has done with: one that had none would lock all nodes for good."""
    _, ((owner, _, pages), _) = ranks
    monkeypatch.setattr(BanyanLinker, "is_whole_rank", num_shards == 1)
    assert owner.offload(transfer(keys(1), pages.alloc(PAGE)))
    owner.stop()
    for number in (2, 3):
        assert owner.offload(transfer(keys(number), pages.alloc(PAGE))) == (num_shards == 2)
    if num_shards == 1:
        return
    assert owner.num_completed_offloads() == 3
    assert [owner.pop_completed_offload() for _ in range(3)] == [True, False, False]
    owner.offload(transfer(keys(4), pages.alloc(PAGE)))
    owner.reset()
    assert owner.num_completed_offloads() == 0, "SGLang has forgotten them"


@pytest.mark.parametrize("num_shards", [1, 2])
def test_offload_when_it_fails_in_one_shard_then_the_others_go_on_with_their_node(ranks, monkeypatch, num_shards):
    _, ((owner, _, pages), _) = ranks
    monkeypatch.setattr(BanyanLinker, "is_whole_rank", num_shards == 1)

    def fail(*args):
        raise OSError("no memory")

    monkeypatch.setattr(owner._access, "offload", fail)
    assert owner.offload(transfer(keys(1), pages.alloc(PAGE))) == (num_shards == 2)
    assert owner.num_completed_offloads() == num_shards - 1


def test_load_when_another_shard_is_refused_then_this_one_loads_nothing_and_holds_no_page(monkeypatch):
    others = SimpleNamespace(grant=True)
    monkeypatch.setattr(Shards, "all", lambda self, granted: granted and others.grant)
    config, rank_table = Config(min_fetch_tokens=PAGE, host_gb=0.0), _native.RankTable.create(4)
    (owner, _, pages), (reader, _, own_pages) = (make_rank(monkeypatch, rank_table, rank, config) for rank in (0, 1))
    slots, targets = pages.alloc(PAGE), own_pages.alloc(PAGE)
    owner.offload(transfer(keys(1), slots))
    assert reader.lookup("r", transfer(keys(1), None)) == [1]
    others.grant = False
    assert not reader.load("r", transfer(keys(1), targets))
    assert reader.start_layer_wise_loading() == NOTHING_QUEUED
    pages.free(slots)
    assert owner.figures()["num_quarantined_pages"] == 0


def test_load_when_its_places_cannot_be_told_in_one_shard_then_the_others_get_its_answer(ranks, monkeypatch):
    """They wait for it, and the next agreement would be taken for this one."""
    _, ((owner, _, pages), (reader, _, own_pages)) = ranks
    owner.offload(transfer(keys(1), pages.alloc(PAGE)))
    owner.num_completed_offloads()
    asked = []
    monkeypatch.setattr(reader.cache, "_agreed", lambda granted: asked.append(granted) or granted)

    def fail(slots):
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(reader._access, "frames", fail)
        assert reader.lookup("r", transfer(keys(1), None)) == [1]
        assert not reader.load("r", transfer(keys(1), own_pages.alloc(PAGE))) and asked == [False]
    assert reader.lookup("r", transfer(keys(1), None)) == [1]
    assert reader.load("r", transfer(keys(1), own_pages.alloc(PAGE))) and asked == [False, True]
    assert reader.finish_layer_wise_loading(reader.start_layer_wise_loading())


@pytest.fixture
def build_in_vain(monkeypatch):
    """What SGLang gets of a linker that cannot be built, in a rank of so many processes; whether that is off then."""

    def fail(*args, **kwargs):
        raise OSError("too many open files")

    def run(num_shards):
        monkeypatch.setattr(entry, "Shards", lambda params: SimpleNamespace(is_one=num_shards == 1))
        return entry.Linker(SERVER, None, components=set(), extra_config={})

    turned_off = []
    monkeypatch.setattr(entry, "BanyanLinker", fail)
    monkeypatch.setattr(entry.own_slots, "agree_on_server", lambda args: None)
    for name, otherwise in (("counts", dict), ("note", lambda *args, **kwargs: None)):
        monkeypatch.setattr(entry.faults, name, otherwise)
    monkeypatch.setattr(runtime, "turn_off", lambda: turned_off.append(True))
    return run, turned_off


def test_linker_when_it_cannot_be_built_then_its_rank_goes_on_without_sharing(build_in_vain):
    run, turned_off = build_in_vain
    built = run(1)
    assert turned_off and not built.offload(transfer(keys(1), None)) and built.num_completed_offloads() == 0


def test_linker_when_it_cannot_be_built_in_a_shard_then_the_start_ends_with_the_fault(build_in_vain, capsys):
    """The others of its rank have theirs: they would wait for agreements that this one never joins."""
    run, turned_off = build_in_vain
    with pytest.raises(SystemExit):
        run(2)
    assert not turned_off and "too many open files" in capsys.readouterr().err


def test_page_when_freed_then_it_is_not_offered_any_more(ranks):
    _, ((owner, _, pages), (reader, *_)) = ranks
    slots = pages.alloc(PAGE)
    owner.offload(transfer(keys(1), slots))
    assert reader.lookup("r", transfer(keys(1), None)) == [1]
    pages.free(slots)
    assert pages.available_size() == TOKENS
    assert reader.cache.copies_of(keys(1))[0] is not SourceKind.PEER, "the arena may have it"


def test_weights_when_updated_on_one_rank_then_it_shares_nothing_until_the_other_followed(ranks):
    _, ((owner, _, pages), (reader, *_)) = ranks
    owner.weights_changed()
    slots = pages.alloc(PAGE)
    owner.offload(transfer(keys(1), slots))
    assert reader.lookup("r", transfer(keys(1), None)) == []
    reader.weights_changed()
    assert reader.lookup("s", transfer(keys(1), None)) == [1]


def test_weights_when_they_have_changed_then_what_was_asked_for_before_could_not_have_been_found(ranks):
    _, ((rank, *_), (peer, *_)) = ranks
    asked_before = []
    for _ in range(2):
        for one in (rank, peer):
            one.weights_changed()
        pages = rank.demand.tell(keys(1))
        asked_before.append(rank.demand.asked(pages, "r"))
        rank.demand.answered(PAGE + 1, pages, 0)
        assert [one.state()["hit_ceiling_24h"] for one in (rank, peer)] == [0.0, 0.0]
    assert asked_before == [0, 0] and rank.demand.asked(pages, "s") == 1


def test_page_when_it_was_computed_by_another_sglang_then_it_is_another_page(ranks, monkeypatch):
    _, ((owner, *_), (peer, *_)) = ranks
    assert owner.kinds.full.namespace() == peer.kinds.full.namespace()
    carried_today = carried
    monkeypatch.setitem(globals(), "carried", lambda table: {**carried_today(table), "engine": "sglang of tomorrow"})
    of_tomorrow, *_ = make_rank(monkeypatch, _native.RankTable.create(4), 0, Config(min_fetch_tokens=PAGE))
    digests = [one.kinds.full._namespace_digest() for one in (owner, of_tomorrow)]
    of_tomorrow.close()
    assert digests[0] != digests[1]


def test_rank_when_sglang_keeps_no_radix_cache_then_one_line_says_so(monkeypatch, caplog):
    make_rank(monkeypatch, _native.RankTable.create(4), 0, Config(min_fetch_tokens=PAGE), disable=True)
    assert caplog.text.count("nothing will be shared") == 1


def settle_kept(linker, num_pages):
    """Until the arena's pages have been copied down and summed."""
    deadline_s = time.monotonic() + 10
    while linker.counters.kept_pages < num_pages:
        assert time.monotonic() < deadline_s
        linker.num_completed_offloads()
        time.sleep(0.001)


def test_arena_when_the_server_is_killed_then_the_next_one_has_its_pages(monkeypatch):
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="banyan-test-") as folder:
        config = Config(min_fetch_tokens=PAGE, host_gb=0.001, keep_host_arena=f"{folder}/first")
        owner, pool, pages = make_rank(monkeypatch, _native.RankTable.create(4), 0, config)
        names, slots = keys(1, 2), pages.alloc(2 * PAGE)
        owner.offload(transfer(names, slots))
        settle_kept(owner, 2)
        # What a process leaves that is killed now; its lock would have gone with it.
        shutil.copytree(f"{folder}/first", f"{folder}/second")
        config = Config(min_fetch_tokens=PAGE, host_gb=0.001, keep_host_arena=f"{folder}/second")
        heir, heirs_pool, heirs_pages = make_rank(monkeypatch, _native.RankTable.create(4), 0, config)
        assert heir.lookup("r", transfer(names, None)) == [2]
        targets = heirs_pages.alloc(2 * PAGE)
        assert heir.load("r", transfer(names, targets))
        index = heir.start_layer_wise_loading()
        assert heir.finish_layer_wise_loading(index)
        assert torch.equal(page(heirs_pool, targets), page(pool, slots))
        for linker in (owner, heir):
            linker.close()


def test_state_when_both_ranks_hold_a_prefix_then_it_says_who_holds_what_and_how_much_is_held_twice(ranks, monkeypatch):
    _, ((owner, _, pages), (reader, _, own_pages)) = ranks
    names = keys(1, 2, 3)
    for rank, allocator, num_pages in ((owner, pages, 3), (reader, own_pages, 1)):
        slots = allocator.alloc(num_pages * PAGE)
        rank.offload(transfer(names[:num_pages], slots))
        rank.num_completed_offloads()
    monkeypatch.setattr(module.requests, "prompt_keys", lambda request, page_tokens: names)
    for rank in (owner, reader):
        rank.arrive("r")
    # As it goes to the main process and out.
    told = [json.loads(json.dumps(rank.state())) for rank in (owner, reader)]
    assert [state["num_sampled_pages"] for state in told] == [3, 1]
    assert [state["distinct_share"] for state in told] == [pytest.approx(2.5 / 3, abs=1e-4), 0.5]
    assert all((state["num_ranks"], state["num_live_ranks"]) == (2, 2) for state in told)
    assert [state["num_pool_pages"] - state["num_free_pages"] for state in told] == [3, 1]
    if owner.kinds.full.tier is not None:
        (prompt,) = told[0]["prompts"]
        shown = Pseudonyms("s")
        assert prompt["rid"] == rid_pseudonym(shown.nonce, "r")
        assert (prompt["num_tokens"], prompt["pools"]) == (3 * PAGE, [3 * PAGE, PAGE])
        assert prompt["marks"][-1] == [3 * PAGE, shown.of_key(names[2])]
        assert told[1]["prompts"][0]["marks"] == prompt["marks"], "prompts of all ranks can be laid over each other"
    owner.reset()
    assert owner.state()["num_sampled_pages"] == 0
    assert owner.figures()["num_published_pages"] == 0


def test_arrive_when_a_session_keeps_the_request_then_no_page_is_held_for_it_until_the_session_is_closed(
    ranks, monkeypatch
):
    """Its client may have aborted it in the queue, and SGLang tells nobody."""
    _, ((rank, _, _), _) = ranks
    monkeypatch.setattr(module.requests, "prompt_keys", lambda request, page_tokens: keys(1, 2))
    request = Request("one")
    request.session = object()
    module.requests.register(request)
    rank.arrive(module.requests.id_of(request))
    assert chance(rank, keys(2)[0]) < math.inf


def test_state_when_it_is_asked_for_at_once_again_then_what_takes_long_is_as_it_was_and_counters_go_on(
    ranks, monkeypatch
):
    """Whoever reaches the port asks as often as he likes, and decodes wait."""
    _, ((rank, *_), _) = ranks
    monkeypatch.setattr(figures, "HISTORY_SHARE", 1e-9)
    before = rank.state()
    rank.counters.lookups += 1
    now = rank.state()
    assert all(now[name] is before[name] for name in ("prompts", "plans", "dropped"))
    assert now["lookups"] == before["lookups"] + 1


class Request(Matched):
    """In SGLang's queue, and known by its id for as long as it is there."""

    output_ids, banyan_asked, dp_max_kv_rank, banyan_reads = (), None, -1, None

    def __init__(self, rid):
        self.rid, self.origin_input_ids = rid, [0] * (2 * PAGE)


def chance(rank, key):
    (found,) = rank.demand.reuse_probabilities([key])
    return found


def test_arrive_when_a_request_waits_then_its_pages_are_wanted_until_it_is_served_or_gone(ranks, monkeypatch):
    _, ((rank, _, _), _) = ranks
    asked = {"one": keys(1, 2), "two": keys(3, 4)}
    monkeypatch.setattr(module.requests, "prompt_keys", lambda request, page_tokens: asked[rid_of(request)])
    waiting = [Request(rid) for rid in asked]
    for request in waiting:
        module.requests.register(request)
        rank.arrive(module.requests.id_of(request))
    assert chance(rank, keys(2)[0]) == chance(rank, keys(4)[0]) == math.inf
    rank.demand.served(module.requests.id_of(waiting[0]))
    assert chance(rank, keys(2)[0]) < chance(rank, keys(4)[0]) == math.inf
    waiting.clear()
    del request
    gc.collect()
    rank.num_completed_offloads()
    assert chance(rank, keys(4)[0]) < math.inf
    assert rank.state()["age_power"] == -1.0


def test_arrive_when_sharing_has_stopped_then_nothing_is_read_for_the_request(ranks, monkeypatch):
    """Nobody asks for it; the drive and the arena are of use to others."""
    _, ((rank, _, _), (peer, _, _)) = ranks
    monkeypatch.setattr(module.requests, "prompt_keys", lambda request, page_tokens: keys(1))
    prepared = []
    monkeypatch.setattr(rank.kinds, "arrive", lambda request, *args: prepared.append(request))
    rank.arrive("before")
    rank.stop()
    rank.arrive("after")
    assert prepared == ["before"] * (rank.kinds.full.tier is not None)
    assert peer.counters.peer_prompts == 0
    peer.arrive("another")
    assert peer.counters.peer_prompts == 2, "but what it asks for is told all the same"


def test_arrive_when_a_prompt_has_come_to_the_other_rank_then_it_is_heard_of_when_the_next_one_comes(
    ranks, monkeypatch
):
    _, ((rank, _, _), (peer, _, _)) = ranks
    asked = {"one": keys(1, 2), "two": keys(3, 4)}
    monkeypatch.setattr(module.requests, "prompt_keys", lambda request, page_tokens: asked[request])
    for _ in range(2):
        peer.arrive("one")
    assert not rank.demand.is_asked_again(keys(2)[0])
    rank.arrive("two")
    assert rank.demand.is_asked_again(keys(2)[0])
    assert chance(rank, keys(2)[0]) < chance(rank, keys(4)[0]) == math.inf
    assert not rank.demand.is_asked_again(keys(4)[0])
    assert (rank.counters.peer_prompts, peer.counters.peer_prompts) == (2, 0)


def test_arrive_when_a_line_of_a_session_changes_each_time_then_the_rank_says_where(ranks):
    _, ((rank, _, _), _) = ranks
    for turn in range(3):
        request = Request(f"r{turn}")
        request.origin_input_ids = array("q", [*range(20), 900 + turn, *range(100, 200)])
        request.banyan_session, request.extra_key, request.cache_salt, request.lora_id = "s", None, None, None
        module.requests.register(request)
        rank.arrive(module.requests.id_of(request))
    assert module.requests.parting_of(request) == Parting(20 // PAGE * PAGE, 3)
    (line,) = json.loads(json.dumps(rank.state()))["changing_lines"]
    assert (line["place"], line["num_prompts"], line["text"]) == (20, 3, "")
    assert rank.counters.changing_line_prompts == 1


@pytest.mark.parametrize("tells", [True, False])
def test_arrive_when_a_line_of_a_session_changes_then_its_text_is_told_where_the_operator_wants_it(monkeypatch, tells):
    config = Config(min_fetch_tokens=PAGE, host_gb=0.0, tells_lines=tells)
    rank, *_ = make_rank(monkeypatch, _native.RankTable.create(4), 0, config)
    for turn in range(3):
        request = Request(f"r{turn}")
        vars(request).update(vars(chat_request(chat(turn))), cache_salt=None, extra_key=None, lora_id=None)
        module.requests.register(request)
        rank.arrive(module.requests.id_of(request))
    (line,) = rank.state()["changing_lines"]
    assert ("stamp" in line["text"]) is tells


def test_metrics_when_the_linker_runs_then_each_of_its_figures_is_shown_and_kept_up(ranks, monkeypatch):
    _, ((owner, _, pages), _) = ranks
    registry = prometheus_client.CollectorRegistry()
    for made in ("Counter", "Gauge"):
        monkeypatch.setattr(prometheus_client, made, partial(getattr(prometheus_client, made), registry=registry))
    exporter = report._Exporter(owner, {"dp_rank": "0", "tp_rank": "0"})
    owner.offload(transfer(keys(1), pages.alloc(PAGE)))
    owner.num_completed_offloads()
    owner.counters.count_prompt(9, own=4, peer=0, host=0, store=0)
    exporter.flush_if_due(1.0)
    labels = {"dp_rank": "0", "tp_rank": "0"}
    own = [name for name in SERIES if not name.startswith("store_") or name == "store_tokens"]
    told = {name: registry.get_sample_value(SERIES[name].name, labels) for name in own}
    assert (told["prompt_tokens"], told["own_tokens"], told["published_pages"]) == (9, 4, 1)
    assert (told["num_published_pages"], told["num_live_ranks"], told["num_free_pages"]) == (1, 2, TOKENS // PAGE - 1)
    missing = {name for name, value in told.items() if value is None}
    assert "num_silent_ranks" in missing, "the dispatcher shows it: a rank that stands still cannot"
    of_arenas = {name for name in GAUGES if name.startswith("num_arena")}
    assert missing <= {"num_arena_evicted_pages", "num_silent_ranks", *of_arenas}


def test_metrics_when_a_counter_grows_then_so_does_its_series_and_when_it_has_begun_anew_it_goes_on(ranks, monkeypatch):
    _, ((owner, _, _), _) = ranks
    registry = prometheus_client.CollectorRegistry()
    for made in ("Counter", "Gauge"):
        monkeypatch.setattr(prometheus_client, made, partial(getattr(prometheus_client, made), registry=registry))
    values = {"copy_us": 1_500_000, "store_written_bytes": 10}
    monkeypatch.setattr(module.report._Exporter, "_values", lambda self: values)
    exporter = module.report._Exporter(owner, {"dp_rank": "0"})
    exporter.flush_if_due(1.0)
    values["store_written_bytes"] = 4
    exporter.flush_if_due(9.0)
    shown = {name: registry.get_sample_value(SERIES[name].name, {"dp_rank": "0"}) for name in values}
    assert shown == {"copy_us": 1.5, "store_written_bytes": 14}


def polled_until(linker, condition):
    """Scheduling steps, until something has come of them."""
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        linker.num_completed_offloads()
        time.sleep(0.001)


@pytest.mark.parametrize("is_slow", [False, True])
def test_weights_when_the_store_has_not_taken_old_pages_then_their_frames_are_not_given_to_new_ones(
    monkeypatch, tmp_path, is_slow
):
    """A store that is merely slow is waited for."""
    monkeypatch.setattr(tier, "LAST_ANSWERS_S", 10.0 if is_slow else 0.05)
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001, store=(str(tmp_path),), store_gb=0.01, store_admit="first")
    rank, _, pages = make_rank(monkeypatch, _native.RankTable.create(4), 0, config)

    def archive():
        # Not kept: what holds the old tier holds its reader's bit.
        return rank.kinds.full.tier.store._archive

    store = archive()._store

    class Hanging:
        def __getattr__(self, name):
            return getattr(store, name)

        def sync(self, within_s=None):
            # What is logged keeps the traceback, and with it the old tier, as long as pytest keeps the log.
            if not is_slow:
                raise TimeoutError("it does not answer")

        def completed(self):
            return store.completed() if is_slow and time.monotonic() > answers_s else []

    answers_s = math.inf
    archive()._store = Hanging()
    names = keys(1, 2)
    rank.kinds.full.tier.store.learn([names])
    rank.offload(transfer(names, pages.alloc(2 * PAGE)))
    polled_until(rank, lambda: archive().num_left_behind == 2)
    answers_s = time.monotonic() + 0.2
    with nullcontext() if is_slow else pytest.raises(RuntimeError, match="2 pages for it, have had no answer"):
        rank.weights_changed()
    if not is_slow:
        archive()._store = store
    rank.close()


def test_rank_when_it_reads_from_the_store_then_the_rank_table_says_how_many_pages_it_waits_for(monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001, store=(str(tmp_path),), store_gb=0.01, store_admit="first")
    rank_table = _native.RankTable.create(4)
    writer, _, pages = make_rank(monkeypatch, rank_table, 0, config)
    names, slots = keys(1, 2), pages.alloc(2 * PAGE)
    writer.kinds.full.tier.store.learn([names])
    writer.offload(transfer(names, slots))
    polled_until(writer, lambda: writer.counters.archived_pages == 2)
    writer.close()
    # So slow that the reads can be looked at.
    slow = replace(config, store_read_mb_per_s=0.05)
    rank_table = _native.RankTable.create(4)
    reader, _, _ = make_rank(monkeypatch, rank_table, 1, slow)
    reader.kinds.full.tier.arrive("r", names, all_that_is_found)
    assert [rank_table.reading(member_slot) for member_slot in (0, 1)] == [0, 2]
    assert reader.state()["num_reading_pages"] == 2
    polled_until(reader, lambda: rank_table.reading(1) == 0)
    assert reader.counters.read_pages == 2
    reader.close()


def test_rank_when_its_store_has_to_be_asked_then_the_request_is_awaited_until_its_pages_are_on_their_way(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    url = f"nixl+posix://{tmp_path}"
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001, store=(url,), store_gb=0.1, store_admit="first")
    writer, _, pages = make_rank(monkeypatch, _native.RankTable.create(4), 0, config)
    names, slots = keys(1, 2), pages.alloc(2 * PAGE)
    writer.kinds.full.tier.store.learn([names])
    writer.offload(transfer(names, slots))
    polled_until(writer, lambda: writer.counters.archived_pages == 2)
    writer.close()
    reader, _, _ = make_rank(monkeypatch, _native.RankTable.create(4), 0, config)
    tier = reader.kinds.full.tier
    tier.arrive("r", names, all_that_is_found)
    tier.arrive("other", keys(3), all_that_is_found)
    assert tier.is_awaited("r") and tier.is_awaited("other")
    polled_until(reader, lambda: not (tier.is_awaited("r") or tier.is_awaited("other")))
    polled_until(reader, lambda: reader.counters.read_pages == 2)
    assert (reader.counters.questions, reader.counters.question_hits) == (2, 1)
    reader.close()
