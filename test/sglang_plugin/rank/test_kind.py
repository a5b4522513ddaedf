# SPDX-License-Identifier: Apache-2.0
"""What a flush leaves of a rank in the store, and files that a rank must not take for what it has loaded: ranks in one
process."""

from __future__ import annotations

import logging
from functools import partial
from unittest.mock import Mock

import pytest
from test.sglang_plugin.rank import test_linker as rig
from test.sglang_plugin.rank.test_linker import PAGE, make_rank, polled_until, transfer
from test.unit.directory.rig import keys

from banyan import _native
from banyan.arena.page_source import all_that_is_found
from banyan.config import Config
from banyan.sglang_plugin import model_files, runtime
from banyan.sglang_plugin.rank import identity, kind


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """The first has stored a page, the second the page behind it."""
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001, store=(str(tmp_path),), store_gb=0.04, store_admit="first")
    rank_table, names = _native.RankTable.create(4), keys(1, 2)
    built = [make_rank(monkeypatch, rank_table, rank, config) for rank in (0, 1)]
    for (rank, _, pages), name in zip(built, names, strict=True):
        rank.kinds.full.tier.store.learn([names])
        if name != names[0]:
            # Behind a page that the store is not known to have none is taken.
            polled_until(rank, lambda rank=rank: rank.kinds.full.store.lookup(names[:1]).num_pages == 1)
        rank.offload(transfer([name], pages.alloc(PAGE)))
        polled_until(rank, lambda rank=rank: rank.counters.archived_pages == 1)
    ranks = [rank for rank, *_ in built]
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["front first", "front last"])
def test_ranks_when_they_flush_one_after_the_other_then_nothing_of_theirs_is_in_the_store(ranks, order, tmp_path):
    names = keys(1, 2)
    assert [rank.kinds.full.store.lookup(names[:1]).num_pages for rank in ranks] == [1, 1]
    for number in order:
        ranks[number].reset()
    for rank in ranks:
        # At the first look.
        assert [rank.kinds.full.store.lookup([name]).num_pages for name in names] == [0, 0]
    assert _native.store_survey([str(tmp_path)])["num_records"] == 0


def test_name_when_a_rank_tells_it_to_the_other_server_of_a_pair_then_it_is_of_all_that_it_computes_with(ranks):
    assert ranks[0].weights_name == ranks[0].kinds.full._identity.computing("weights")


@pytest.mark.parametrize("change", ["note_change", "note_content"])
def test_name_when_weights_change_then_who_sees_their_new_number_sees_no_old_name(ranks, monkeypatch, change):
    full, seen = ranks[0].kinds.full, []

    class Watched(type(full)):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "weights_epoch":
                seen.append(self.weights_name)

    before = full.weights_name
    monkeypatch.setattr(full, "__class__", Watched)
    getattr(full, change)("other")
    assert len(seen) == 1 and before not in seen


def test_name_when_a_rank_cannot_leave_the_pages_of_its_old_weights_then_it_tells_none(ranks, monkeypatch):
    rank = ranks[0]
    monkeypatch.setattr(rank.kinds, "leave", Mock(side_effect=RuntimeError("a peer does not stop reading")))
    for change in (rank.weights_changed, partial(rank.weights_are, "0a" * 32)):
        with pytest.raises(RuntimeError):
            change()
        assert rank.weights_name == ""


def test_rank_when_the_drive_does_not_take_a_flush_in_time_then_it_goes_on_and_says_so(ranks, monkeypatch, caplog):
    class Slow:
        def clear(self):
            raise OSError("cannot clear the store within 10s")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "banyan"):
        patched.setattr(ranks[0].kinds.full, "store", Slow())
        ranks[0].reset()
    assert "other ranks may still find" in caplog.text and "within 10s" in caplog.text


def test_figures_when_others_read_from_the_drive_of_the_store_then_what_they_met_is_counted_with_it(ranks):
    full = ranks[0].kinds.full
    before = full.store_figures()["store"]
    full._sources.append(Mock(store_troubles=lambda: {"checksum_failures": 3}, state=dict))
    assert full.store_figures()["store"] == before | {"checksum_failures": before["checksum_failures"] + 3}
    full._sources.pop()


@pytest.mark.parametrize("has_store", [True, False])
def test_rank_when_a_file_was_replaced_while_it_was_loaded_then_nothing_is_stored_under_its_name(
    monkeypatch, tmp_path, capsys, has_store
):
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "of what is there now")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"loaded")
    rank_table = _native.RankTable.create(4)
    carried = {**rig.carried(rank_table), "noted": [model_files.note(str(tmp_path))]}
    monkeypatch.setattr(rig, "carried", lambda rank_table: carried)
    weights.write_bytes(b"others")
    store = tmp_path / "store"
    store.mkdir()
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001, store=(str(store),) if has_store else (), store_gb=0.04)
    if not has_store:
        make_rank(monkeypatch, rank_table, 0, config)[0].close()
        return
    with pytest.raises((SystemExit, runtime.Refused)):
        make_rank(monkeypatch, rank_table, 0, config)
    assert f"{weights} has changed since the server was started: start it again" in capsys.readouterr().err
    assert list(store.iterdir()) == []


@pytest.mark.parametrize(("asked", "layers_per_read"), [(1, 1), (2, 2), (0, rig.LAYERS), (None, rig.LAYERS)])
def test_tier_when_the_user_says_how_many_layers_a_read_has_then_so_many(monkeypatch, asked, layers_per_read):
    places = []

    class Tier(kind.HostTier):
        def __init__(self, place, *rest):
            places.append(place)
            super().__init__(place, *rest)

    monkeypatch.setattr(kind, "HostTier", Tier)
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001, store_layers_per_read=asked)
    make_rank(monkeypatch, _native.RankTable.create(4), 0, config)[0].close()
    assert [place.layers_per_read for place in places] == [layers_per_read]


def small_rank(monkeypatch, **flags):
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001, **flags)
    rank, *_ = make_rank(monkeypatch, _native.RankTable.create(4), 0, config)
    return rank


def test_prompt_when_a_nearer_source_knows_more_of_it_then_the_next_is_told_how_much_of_that_lies_here(monkeypatch):
    rank = small_rank(monkeypatch)
    tier, near, far = rank.kinds.full.tier, Mock(), Mock()
    near.ask.return_value = far.ask.return_value = 3
    monkeypatch.setattr(tier, "sources", [near, far])
    monkeypatch.setattr(tier, "_num_held", lambda keys, num_in_arena: 2)
    tier.arrive("r", keys(1, 2, 3, 4), all_that_is_found)
    (wanted,) = far.ask.call_args.args
    assert (wanted.num_here, wanted.num_held) == (2, 3)
    monkeypatch.undo()
    rank.close()


def test_pages_when_only_ranks_that_read_the_pool_want_them_then_they_need_not_lie_in_the_arena_before_they_leave(
    monkeypatch,
):
    rank = small_rank(monkeypatch)
    assert rank.writes_back is rank.kinds.full.tier.backup.write_back
    rank.close()


@pytest.mark.parametrize(
    ("of", "what"),
    [
        ("access", {"shares_pool": False}),
        ("tier", {"sources": ["a store"]}),
        ("tier", {"_persistence": "the next server"}),
        ("tier", {"partner": "the other server of a pair"}),
        ("tier", None),
        ("config", {"fetches": False}),
        ("config", {"deals_with_nodes": True}),
        ("config", {"tenant_share": 0.5}),
        ("cache", {"is_stopped": True}),
        ("steps_together", True),
    ],
)
def test_pages_when_others_want_them_then_they_go_down_as_they_come(monkeypatch, of, what):
    rank = small_rank(monkeypatch)
    full = rank.kinds.full
    match of:
        case "steps_together":
            monkeypatch.setattr(type(full.member_slots.layout), of, what)
        case _ if what is None:
            monkeypatch.setattr(full, of, None)
        case _:
            part = {"config": type(full.config), "cache": type(rank.cache)}.get(of) or getattr(full, of)
            for name, value in what.items():
                monkeypatch.setattr(part, name, value)
    assert rank.writes_back is None
    monkeypatch.undo()
    rank.close()
