# SPDX-License-Identifier: Apache-2.0
"""An embedding forward over a prefix that is still under way: SGLang's own function, with the hooks of the queue."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import tp_worker
from test.e2e.late_copies.late import LatePeers
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_linker import LAYERS, PAGE, make_rank, transfer
from test.unit.directory.rig import keys

from banyan import _native
from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import requests

FORWARD = "sglang.srt.managers.tp_worker.BaseTpWorker.forward_batch_embedding"
QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"


class Runner:
    """Reads each layer's page as a model would: behind SGLang's wait."""

    def __init__(self, counter, pool, slots):
        self.counter, self.pool, self.slots = counter, pool, slots

    def forward(self, _batch):
        seen = []
        for layer in range(LAYERS):
            self.counter.wait_until(layer)
            seen.append(self.pool.k_buffer[layer][self.slots].clone())
        return SimpleNamespace(logits_output=seen, can_run_graph=False)


class Worker(tp_worker.TpModelWorker):
    def __init__(self, counter, runner):
        self._model_runner = runner
        self.register_hicache_layer_transfer_counter(counter)


@pytest.fixture(autouse=True)
def _sharing(monkeypatch):
    monkeypatch.setattr(runtime, "config", Config)
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)


def test_forward_when_pages_are_under_way_then_each_layer_is_read_behind_its_copy(monkeypatch):
    monkeypatch.setattr(tp_worker.ForwardBatch, "init_new", lambda batch, *args, **kwargs: batch)
    rank_table, config = _native.RankTable.create(2), Config(min_fetch_tokens=PAGE, host_gb=0.0)
    owner, pool, pages = make_rank(monkeypatch, rank_table, 0, config)
    reader, own_pool, own_pages = make_rank(monkeypatch, rank_table, 1, config)
    reader.cache._full.supply.peers = LatePeers(reader.cache._full.supply.peers)
    slots, targets = pages.alloc(PAGE), own_pages.alloc(PAGE)
    owner.offload(transfer(keys(1), slots))
    assert reader.lookup("r", transfer(keys(1), None)) == [1] and reader.load("r", transfer(keys(1), targets))
    batch = SimpleNamespace(hicache_consumer_index=reader.start_layer_wise_loading())
    counter = reader.layer_done_counter
    forward = hooked(FORWARD, tp_worker.BaseTpWorker.forward_batch_embedding)
    seen, _ = forward(Worker(counter, Runner(counter, own_pool, targets)), batch)
    for layer in range(LAYERS):
        assert torch.equal(seen[layer], pool.k_buffer[layer][slots])
    assert reader.finish_layer_wise_loading(batch.hicache_consumer_index)


def test_request_when_it_is_queued_without_having_been_introduced_then_it_is_known(monkeypatch):
    make_rank(monkeypatch, _native.RankTable.create(2), 0, Config(min_fetch_tokens=PAGE, host_gb=0.0))

    class Req:
        rid = "an embedding"
        lora_id = extra_key = cache_salt = multimodal_inputs = None
        origin_input_ids = (1, 2, 3)
        output_ids = ()

    req = Req()
    hooked(QUEUE, lambda scheduler, req: None)(None, req)
    assert requests.is_known(req)
    assert (req.dp_origin_kv_len, req.dp_max_kv_rank, req.banyan_tokens) == (0, -1, {})
