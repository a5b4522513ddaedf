# SPDX-License-Identifier: Apache-2.0
"""Which other sizes a rank looks for in its store, and which ranks look for none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from test.unit.features.resharding.test_stored_shards import (
    NUM_HEADS,
    WANTED,
    block_of,
    namespace_of,
    open_store,
    write,
)
from test.unit.layout.test_namespace import ONE

from banyan.arena.page_source import Source
from banyan.config import Config
from banyan.features.resharding.rank import other_sizes
from banyan.features.resharding.rank.other_sizes import OtherSizes, register
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank.points import Points
from banyan.telemetry import Counters

STORE, NODES = Source(), Source()


def access_of(folder, size, shard, *, num_kv_heads=NUM_HEADS, num_pool_heads=None, has_heads=True, **other):
    namespace = namespace_of(size, shard)
    pool = SimpleNamespace(**({"head_num": num_pool_heads or max(1, NUM_HEADS // size)} if has_heads else {}))
    return OtherSizes(
        SimpleNamespace(
            config=Config(store=(str(folder),)),
            block=block_of(namespace),
            pools=SimpleNamespace(pool=pool),
            num_kv_heads=num_kv_heads,
            namespace=lambda: replace(namespace, **other),
        )
    )


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Asks for the sources of a shard; says which sizes it has found, and where its source is."""
    stores = []
    monkeypatch.setattr(runtime, "is_on_gpu", lambda: True)

    def ask(size, shard, **other):
        stores.append(open_store(tmp_path, size, shard))
        access = access_of(tmp_path, size, shard, **other)
        parts = SimpleNamespace(files=stores[-1], store=STORE, prefetch=None, counters=Counters())
        sources = access.sources(parts, [STORE, NODES])
        for source in sources:
            source.close()
        assert access.state() == ({"resharding": {"attn_tp_sizes": access._sizes}} if access._sizes else {})
        assert [sources[0], sources[-1], len(sources)] == [STORE, NODES, 2 + bool(access._sizes)]
        return access._sizes

    yield ask
    for store in stores:
        store.close()


def test_sizes_when_servers_of_several_have_stored_then_all_but_the_own_are_found(rank, tmp_path, caplog):
    assert rank(2, 0) == [], "nobody has stored anything"
    for size in (1, 2, 8):
        write(tmp_path, size)
    with caplog.at_level("INFO"):
        assert rank(2, 1) == [1, 8]
    assert "attention TP [1, 8] are found, too" in caplog.text
    assert rank(1, 0) == [2, 8] and rank(8, 5) == [1, 2]


def test_page_of_another_size_when_it_is_damaged_then_counted_with_the_store_also_when_it_is_joined_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(runtime, "is_on_gpu", lambda: True)
    write(tmp_path, 2)
    for path in tmp_path.glob("shelf-*/segment-*"):
        content = bytearray(path.read_bytes())
        content[4096::64] = bytes(len(content[4096::64]))
        path.write_bytes(content)
    own, access = open_store(tmp_path, 1, 0), access_of(tmp_path, 1, 0)
    parts = SimpleNamespace(files=own, store=STORE, prefetch=None, counters=Counters())
    for number in (1, 2):
        (_, source) = access.sources(parts, [STORE])
        (division,) = source._divisions
        failed = [read.failed_pages() for read in division.read(WANTED[:1])[1]]
        assert failed == [[0], [0]]
        troubles = access.store_troubles()
        assert troubles == {"checksum_failures": 2 * number, "read_errors": 0, "stalls": 0}
        source.close()
    assert own.stats()["checksum_failures"] == 0
    own.close()


def test_size_when_one_of_its_shards_has_stored_nothing_then_it_is_none(rank, tmp_path):
    write(tmp_path, 2)
    (shelf, *_) = sorted(tmp_path.glob("shelf-*"))
    for path in sorted(shelf.rglob("*"), reverse=True):
        path.unlink()
    shelf.rmdir()
    assert rank(1, 0) == []


@pytest.mark.parametrize(
    "other",
    [
        {"num_kv_heads": 0},
        {"num_pool_heads": 3},
        {"draft": ("EAGLE", "a-draft")},
        {"window": ("full", "40 tokens", "wf")},
        {"pool_layout": "Pool/vectorized_5d"},
        {"attn_cp_size": 2},
        {"page": ((("latents", 512),),), "has_heads": False},
    ],
)
def test_pages_when_they_are_not_heads_alone_then_no_size_is_looked_for(rank, tmp_path, monkeypatch, other):
    write(tmp_path, 2)
    monkeypatch.setattr(other_sizes, "pieces", None)
    assert rank(1, 0, **other) == []


def test_weights_when_they_have_changed_then_no_size_is_looked_for(rank, tmp_path, monkeypatch):
    write(tmp_path, 2)
    monkeypatch.setattr(other_sizes, "sizes", None)
    assert rank(1, 0, weights_epoch=1) == []


def test_cpu_when_there_are_more_shards_than_heads_then_they_have_other_heads_than_on_a_gpu(
    rank, tmp_path, monkeypatch
):
    write(tmp_path, 8)
    assert rank(4, 0) == [8]
    monkeypatch.setattr(runtime, "is_on_gpu", lambda: False)
    assert rank(4, 0) == []
    write(tmp_path, 4)
    assert rank(8, 0) == []


def test_server_when_its_store_is_not_of_files_or_it_has_none_then_nothing_is_added(rank):
    pools = SimpleNamespace(pool=SimpleNamespace(head_num=4))
    kind = SimpleNamespace(namespace=lambda: ONE, block=None, pools=pools, num_kv_heads=4)
    parts = SimpleNamespace(files=None, store=STORE)
    assert OtherSizes(kind).sources(parts, [STORE, NODES]) == [STORE, NODES]
    points = Points()
    register(points)
    assert points.sources[0](SimpleNamespace(config=Config())) is None


def test_store_when_it_cannot_be_read_beside_then_it_is_said_and_the_rank_goes_on(rank, tmp_path, monkeypatch, caplog):
    write(tmp_path, 2)

    def create(num_bytes, label):
        raise OSError("no memory")

    monkeypatch.setattr(other_sizes, "SharedBytes", SimpleNamespace(create=create))
    assert rank(1, 0) == []
    assert "what was stored with another --tp is not read: no memory" in caplog.text
