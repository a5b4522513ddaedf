# SPDX-License-Identifier: Apache-2.0
"""What a rank makes of commands for its cache, over a real rank; SGLang's functions are stood in for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test.sglang_plugin.features.states.test_state_places import shards_of_latents
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_linker import PAGE, make_rank, polled_until, transfer

from banyan import _native
from banyan.arena.partner import Partner
from banyan.config import Config
from banyan.features.told.command import METHOD, Command
from banyan.features.told.rank import told_rank
from banyan.routing.conversation import name_of
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import requests

HANDLE = "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control"
CLOSE = "sglang.srt.managers.scheduler.Scheduler.close_session"
IDS = list(range(100, 100 + 3 * PAGE + 1))


class Rig:
    def __init__(self, monkeypatch, host_gb, **flags):
        monkeypatch.setattr(runtime, "is_sharing", lambda: True)
        monkeypatch.setattr(runtime, "server_id", lambda: "s")
        monkeypatch.setattr(requests, "_page_keys", None)
        config = Config(min_fetch_tokens=PAGE, host_gb=host_gb, told_share=0.25, **flags)
        rank_table = _native.RankTable.create(4)
        self.rank, _, self.pages = make_rank(monkeypatch, rank_table, 0, config)
        monkeypatch.setattr(runtime, "config", lambda: config)
        self.said = []
        to_tokenizer = SimpleNamespace(send_output=lambda output, asked: self.said.append(output))
        self.scheduler = SimpleNamespace(
            ipc_channels=SimpleNamespace(send_to_tokenizer=to_tokenizer),
            tree_cache=SimpleNamespace(banyan_victims=object(), match_prefix=lambda params: None),
        )

    def tell(self, action, ids=IDS, **more):
        self.send({"action": action, **({} if ids is None else {"input_ids": ids}), **more})
        (answer,) = self.said[-1].response
        return answer

    def send(self, body, method=METHOD):
        asked = SimpleNamespace(method=method, body=body)
        hooked(HANDLE, lambda scheduler, asked: self.said.append("SGLang's"))(self.scheduler, asked)

    def refusal(self, body):
        self.send(body)
        assert not self.said[-1].success
        return self.said[-1].error

    def listed(self, **more):
        return [(one["action"], one["num_tokens"]) for one in self.tell("list", None, **more)["prefixes"]]

    def close_session(self, session):
        hooked(CLOSE, lambda scheduler, asked: None)(self.scheduler, SimpleNamespace(session_id=session))


@pytest.fixture(params=[0.0, 0.001], ids=["pools", "pools and arena"])
def rig(monkeypatch, request):
    return Rig(monkeypatch, request.param)


@pytest.fixture
def with_arena(monkeypatch):
    return Rig(monkeypatch, 0.001)


def test_pin_when_told_then_its_whole_pages_are_kept_for_its_tenant_alone_until_it_is_released(rig):
    assert rig.tell("pin", cache_salt="a") == {"num_pages": 3, "num_tokens": 3 * PAGE}
    assert rig.listed(cache_salt="a") == [("pin", 3 * PAGE)] and rig.listed() == rig.listed(cache_salt="b") == []
    assert len(rig.rank.kept_in_pool) == 3
    assert rig.tell("release", cache_salt="b")["num_prefixes"] == 0
    assert rig.tell("release", cache_salt="a")["num_prefixes"] == 1
    assert not rig.rank.kept_in_pool
    assert rig.rank.state()["told"]["num_prefixes"] == 0


def test_pin_when_sglang_chooses_what_leaves_the_pool_then_nobody_is_told_that_the_pool_keeps_it(rig):
    del rig.scheduler.tree_cache.banyan_victims
    assert rig.tell("pin")["num_pages"] == 3
    assert [one["in_pool"] for one in rig.tell("list", None)["prefixes"]] == [False]
    told = rig.rank.state()["told"]
    assert (told["num_pages"], told["num_pool_pages"]) == (3, 0) and not rig.rank.kept_in_pool


def test_release_when_pages_are_kept_no_more_then_the_arena_hears_which(with_arena, monkeypatch):
    heard = []
    monkeypatch.setattr(with_arena.rank.kinds.full.tier.residency, "kept_no_more", heard.extend)
    with_arena.tell("pin")
    kept = set(with_arena.rank.kept_in_pool)
    assert heard == []
    with_arena.tell("release")
    assert len(heard) == 3 and set(heard) == kept


def prompt(number):
    return [1000 + number, *IDS]


def num_pinned_with(rig, makes):
    """How many prompts can be pinned, each with what ``makes`` makes of its number."""
    for number in range(100):
        rig.send({"action": "pin", "input_ids": prompt(number), **makes(number)})
        if not rig.said[-1].success:
            return number
    return 100


@pytest.mark.parametrize(
    ("flags", "makes"),
    [
        ({"tenant_secret_file": "s"}, lambda number: {"cache_salt": "a" * 32 + str(number)}),
        ({"tenant_secret_file": "s"}, lambda number: {"cache_salt": "a" * 32, "extra_key": str(number)}),
        ({}, lambda number: {"cache_salt": "a", "extra_key": str(number)}),
    ],
)
def test_budget_when_a_tenant_makes_up_salts_and_extra_keys_then_it_has_one_budget_all_the_same(
    monkeypatch, flags, makes
):
    with_one = num_pinned_with(Rig(monkeypatch, 0.0), lambda number: {"cache_salt": "a" * 32})
    rig = Rig(monkeypatch, 0.0, **flags)
    assert 0 < num_pinned_with(rig, makes) == with_one < 100
    rig.tell("pin", cache_salt="b" * 32)
    assert rig.listed(**makes(0)) == [("pin", 3 * PAGE)], "each salt lists its own"


def test_budget_when_the_arena_has_yet_to_grow_then_it_is_of_all_that_it_may_have_as_at_every_rank(monkeypatch):
    rig = Rig(monkeypatch, None)
    full = rig.rank.kinds.full
    assert full.tier.residency.num_frames < full.most_arena_frames
    most = int(0.25 * full.most_arena_frames * len(full.member_slots.with_peers))
    assert rig.rank.state()["told"]["most_pages_of_tenant"] == most > 0.25 * rig.rank.num_frames


def test_pin_when_one_shard_alone_has_a_part_of_the_arena_then_the_others_keep_what_it_keeps(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    monkeypatch.setattr(requests, "_page_keys", None)
    config = Config(min_fetch_tokens=PAGE, host_gb=0.008)
    ((first, second),) = shards_of_latents(monkeypatch, config, ranks=(0,))
    told = [shard.linker.state()["told"]["most_pages_of_tenant"] for shard in (first, second)]
    assert told[0] == told[1] > second.linker.num_frames
    pin = Command.of({"action": "pin", "input_ids": list(range(told[0] * PAGE + 1))})
    for shard in (first, second):
        (at,) = [one for one in shard.linker.attachments if isinstance(one, told_rank.ToldRank)]
        assert at.obey(pin, SimpleNamespace())["num_pages"] == told[0]


def test_list_when_others_have_told_more_since_then_it_has_what_is_kept(rig, monkeypatch):
    monkeypatch.setattr(told_rank, "MOST_LISTED", 1)
    rig.tell("pin", cache_salt="a")
    rig.tell("pin", cache_salt="b")
    assert rig.listed(cache_salt="a") == rig.listed(cache_salt="b") == [("pin", 3 * PAGE)]


def test_pin_when_its_time_is_over_then_the_next_look_lets_it_go(rig):
    rig.tell("pin", ttl_s=1e-6)
    rig.tell("pin", [*IDS[:PAGE], 7], ttl_s=60)
    rig.rank.num_completed_offloads()
    assert len(rig.rank.kept_in_pool) == 1


def test_pin_when_over_the_budget_then_one_line_and_nothing_else(rig):
    line = rig.refusal({"action": "pin", "input_ids": list(range(1000 * PAGE))})
    assert "1000 pages more" in line and "--banyan-told-share 0.25" in line and "\n" not in line
    assert not rig.rank.kept_in_pool and rig.rank.state()["told"]["num_refused"] == 1


@pytest.mark.parametrize(
    "body, said",
    [
        (None, ""),
        ([], ""),
        ({"action": "pin", "input_ids": [1, 2]}, "shorter than a page of 4 tokens"),
        ({"action": "pin", "input_ids": IDS, "cache_salt": "\ud800"}, ""),
        ({"action": "list", "cache_salt": "\ud800"}, "Unicode"),
        ({"action": "pin", "input_ids": IDS, "ttl_s": -1}, "ttl_s"),
        ({"action": "drop", "input_ids": IDS}, "action"),
    ],
)
def test_command_when_it_is_none_then_a_line_and_the_rank_goes_on(rig, body, said):
    assert said in rig.refusal(body)
    assert rig.tell("pin")["num_pages"] == 3


def test_command_when_the_rank_fails_at_it_then_it_says_so_and_sglang_does_not_say_that_it_is_done(rig, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(told_rank.ToldRank, "obey", lambda *args: 1 / 0)
        assert "failed" in rig.refusal({"action": "pin", "input_ids": IDS})
    assert len(rig.said) == 1 and rig.tell("pin")["num_pages"] == 3


def test_command_when_it_is_sglangs_then_sglang_answers(rig):
    rig.send({}, "start")
    assert rig.said == ["SGLang's"]


def test_rank_when_it_has_stopped_to_share_then_it_says_nothing_and_does_not_refuse(rig, monkeypatch):
    rig.rank.stop()
    assert rig.tell("pin") == rig.tell("list", None) == {}
    monkeypatch.setattr(runtime, "is_sharing", lambda: False)
    assert rig.tell("pin") == {}


def test_wish_when_others_were_passed_over_before_it_then_they_are_counted(rig):
    rig.tell("retain", num_untold=3)
    rig.tell("retain")
    assert rig.rank.state()["told"]["num_untold"] == 3


def test_retain_when_another_rank_has_refused_it_then_it_is_kept_no_longer_and_what_was_pinned_is(rig):
    rig.tell("pin", IDS[: PAGE + 1])
    rig.tell("retain", name="1")
    rig.tell("release", takes_back="1")
    assert rig.listed() == [("pin", PAGE)]


def test_session_when_it_is_closed_then_its_prefixes_alone_are_let_go(rig):
    rig.tell("pin", IDS[: PAGE + 1], session=name_of("one"))
    rig.tell("retain", IDS[PAGE:], session=name_of("two"))
    rig.close_session("another")
    assert len(rig.listed()) == 2
    rig.close_session("one")
    assert rig.listed() == [("retain", 2 * PAGE)]


def test_pages_when_pinned_then_the_arena_keeps_them_whoever_comes_and_demoted_ones_go_next(with_arena):
    rig, tier = with_arena, with_arena.rank.kinds.full.tier
    pinned, demoted = (requests.page_keys(ids, PAGE, extra_key=None, cache_salt=None) for ids in (IDS, IDS[1:]))
    assert len(pinned) == len(demoted) == 3
    rig.tell("pin")

    def back_up(names, num_pages):
        rig.rank.offload(transfer(names, rig.pages.alloc(len(names) * PAGE)))
        rig.rank.num_completed_offloads()
        polled_until(rig.rank, lambda: tier.state()["num_arena_pages"] == num_pages)

    back_up(pinned, 3)
    back_up(demoted, 6)
    rig.tell("demote", IDS[1:])
    rig.tell("demote")
    residency = tier.residency
    free = residency.claim(residency.num_free)
    claimed = residency.claim(residency.num_frames)
    assert len(claimed) == 3 and [residency.frame(key) is None for key in demoted] == [True] * 3
    assert all(residency.frame(key) is not None for key in pinned)
    residency.abandon([*free, *claimed])


def test_prefetch_when_there_is_no_arena_then_a_line_says_so_and_else_what_was_found(monkeypatch):
    assert "--banyan-host-gb" in Rig(monkeypatch, 0.0).refusal({"action": "prefetch", "input_ids": IDS})
    assert Rig(monkeypatch, 0.001).tell("prefetch")["num_pages_found"] == 0


def test_prefetch_when_another_server_of_the_pair_reads_then_its_pages_pass_for_nobodys(with_arena):
    class Reader(Partner):
        came_for = ()
        reads_ahead = False

        def came(self, keys, look_again):
            self.came_for = keys

    with_arena.rank.kinds.full.tier.partner = reader = Reader()
    for number in range(16):
        assert with_arena.tell("prefetch", prompt(number))["num_pages_found"] == 0
    assert reader.came_for == ()
