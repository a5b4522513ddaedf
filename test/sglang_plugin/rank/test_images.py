# SPDX-License-Identifier: Apache-2.0
"""A prompt with an image at a rank, from SGLang's own steps to the store: its pages are found by what the image became,
and not by the tokens that stood there before."""

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import MultimodalInputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from test.sglang_plugin.image_prompts import image_prompt
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.matched import Matched
from test.sglang_plugin.rank.test_linker import PAGE, make_rank, polled_until, transfer
from test.sglang_plugin.rank.test_requests import inserted

from banyan import _native
from banyan.config import Config
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import identity, requests
from banyan.sglang_plugin.rank import linker as module

MADE = "sglang.srt.managers.scheduler.Scheduler._create_generation_req"
QUEUED = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
IMAGE, OTHER_IMAGE = 1 << 63 | 5, 1 << 62 | 5
NUM_TOKENS, PLACE = 47, range(16, 35)


class Req(Matched):
    """As much of SGLang's request as is looked at."""

    extra_key = cache_salt = lora_id = kv_hints = None
    output_ids: tuple[int, ...] = ()

    multimodal_inputs = session = None
    skip_radix_cache_insert = False

    def __init__(self, recv_req, rid, ids):
        self.rid, self.origin_input_ids = rid, array("q", ids)


def serve(rid, content):
    """SGLang's steps: it makes the request, writes into its tokens what the image became, and queues it."""
    ids, sent = image_prompt(content, num_tokens=NUM_TOKENS, image=PLACE)
    said = dict.fromkeys(("session_id", "session_params", "routing_key", "kv_hints"))
    recv_req = SimpleNamespace(input_ids=ids, mm_inputs=sent, routed_dp_rank=None, **said)
    req = hooked(MADE, lambda scheduler, recv_req, *args: Req(recv_req, *args))(None, recv_req, rid, ids)
    inputs = MultimodalInputs.from_processor_output(sent)
    assert Scheduler._try_apply_padded_mm_input_ids(recv_req, req, inputs)
    hooked(QUEUED, lambda scheduler, req: None)(None, req)
    return req


def sglangs_keys(req):
    """What its tree looks up: all tokens but the last."""
    return get_storage_hash_str(RadixKey(req.origin_input_ids[:-1]).page_aligned(PAGE), page_size=PAGE)


@pytest.fixture
def rank(monkeypatch, tmp_path):
    """With a store that takes pages at their second access."""
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    monkeypatch.setattr(runtime, "config", Config)
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)
    config = Config(min_fetch_tokens=PAGE, host_gb=0.001, store=(str(tmp_path),), store_gb=0.01, store_admit="second")
    rank, _, pages = make_rank(monkeypatch, _native.RankTable.create(4), 0, config)
    monkeypatch.setattr(module, "_installed", rank)
    yield SimpleNamespace(linker=rank, pages=pages, tier=rank.kinds.full.tier)
    rank.close()


def compute(rank, req):
    """Its pages enter SGLang's tree."""
    keys = sglangs_keys(req)
    rank.linker.offload(transfer(keys, rank.pages.alloc(len(keys) * PAGE)))
    polled_until(rank.linker, lambda: rank.linker.counters.backed_up_pages >= len(keys))
    return keys


def test_request_when_its_tokens_are_known_then_it_arrives_once_with_sglangs_keys(rank, monkeypatch):
    seen = []
    monkeypatch.setattr(rank.tier, "arrive", lambda rid, keys, worth: seen.append((rid, list(keys))))
    req = serve("r", IMAGE)
    assert seen == [(requests.id_of(req), sglangs_keys(req))] and len(seen[0][1]) == (NUM_TOKENS - 1) // PAGE
    # It was retracted.
    hooked(QUEUED, lambda scheduler, req: None)(None, req)
    assert len(seen) == 1


def scheduler_of(architecture):
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture])))


@pytest.mark.parametrize(
    ("architecture", "has_media", "session", "is_barred"),
    [
        ("Qwen2_5_VLForConditionalGeneration", True, None, False),
        ("Qwen2_5_VLForConditionalGeneration", True, "a session", True),
        ("Qwen2_5_VLForConditionalGeneration", False, "a session", False),
        ("Gemma4ForConditionalGeneration", True, None, True),
        ("Gemma4ForConditionalGeneration", False, None, False),
    ],
)
def test_request_when_its_kv_depends_on_more_than_its_tokens_then_it_leaves_nothing_in_the_tree(
    rank, architecture, has_media, session, is_barred
):
    req = serve("r", IMAGE)
    req.multimodal_inputs, req.session = "an image" if has_media else None, session
    hooked(QUEUED, lambda scheduler, req: None)(scheduler_of(architecture), req)
    assert req.skip_radix_cache_insert == is_barred


def test_prompt_when_it_is_asked_for_again_then_it_is_stored_and_another_image_finds_the_text_in_front(rank):
    keys = compute(rank, serve("first", IMAGE))
    assert rank.linker.counters.archived_pages == 0
    again = serve("again", IMAGE)
    polled_until(rank.linker, lambda: rank.linker.counters.archived_pages == len(keys))
    assert rank.tier.store.num_stored(requests.prompt_keys(requests.id_of(again), PAGE)) == len(keys)
    other = serve("other", OTHER_IMAGE)
    assert rank.tier.store.num_stored(requests.prompt_keys(requests.id_of(other), PAGE)) == PLACE[0] // PAGE


def test_answer_when_it_follows_an_image_then_the_chain_of_its_pages_is_told(rank):
    req = serve("r", IMAGE)
    req.output_ids = list(range(300, 308))
    whole = RadixKey(array("q", [*req.origin_input_ids, *req.output_ids])).page_aligned(PAGE)
    assert inserted(req, lambda: requests.inserted_chain(PAGE)) == get_storage_hash_str(whole, page_size=PAGE)
