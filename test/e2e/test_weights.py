# SPDX-License-Identifier: Apache-2.0
"""What a trainer does with a server between two rollouts: take its memory, change its weights, and let it go on.

SGLang takes weights from a trainer where it has no replicas, so the ranks step together.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer
from test.e2e.conftest import Client
from test.e2e.test_pairs import first_turn

from benchmark.engine import Engine
from benchmark.modes import asking, models
from benchmark.pd import num_found_pages
from benchmark.pd_servers import Pair
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.warm import ForkedServer

pytestmark = pytest.mark.e2e
NUM_SHARDS = 2
FLAGS = (
    *("--device", "cpu", "--tp", "2", "--attn-dp-size", "2", "--max-total-tokens", "8000", "--context-length", "2048"),
    *("--sleep-on-idle", "--enable-memory-saver", "--skip-server-warmup"),
)
TRAINED = "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def rollout(alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollout")
    strict = ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
    spec = ServerSpec("rollout", 1, "on", FLAGS, (*cpu_env(dp=2), ("SGLANG_NCCL_SO_PATH", "/nonexistent"), strict))
    with ForkedServer(spec, models.ensure(models.MOE), folder) as server:
        wait_ready([server])
        yield Client(server)


@pytest.fixture(scope="module")
def asked():
    return iter(asking.prompts(8))


@pytest.fixture
def handed_over():
    """Puts tensors where other processes find them; what to tell these."""
    before = torch.multiprocessing.get_sharing_strategy()
    # The other way needs a descriptor of this process, and a secret that its children alone have.
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield lambda tensors: MultiprocessingSerializer.serialize(list(tensors.items()), output_str=True)
    torch.multiprocessing.set_sharing_strategy(before)


def shared_by_both(client, ids):
    """Asked at one rank and then at the other, which has it from there; the answer."""
    first, _ = client.generate(ids, rank=0)
    again, meta = client.generate(ids, rank=1)
    assert again == first and meta["cached_tokens_details"]["peer"] == (len(ids) - 1) // 16 * 16
    return first


def told_in_turn(client, *commands):
    """Each of them must succeed."""
    for path, body in commands:
        client.post(path, body)


def test_memory_when_it_is_given_back_and_comes_again_then_nothing_is_lent_between_and_sharing_goes_on(rollout, asked):
    ids = next(asked)
    first = shared_by_both(rollout, ids)
    told_in_turn(rollout, ("/release_memory_occupation", {"tags": ["kv_cache"]}))
    assert [rank["num_published_pages"] for rank in rollout.ranks().values()] == [0, 0]
    told_in_turn(rollout, ("/resume_memory_occupation", {"tags": ["kv_cache"]}))
    again, meta = rollout.generate(ids, rank=1)
    assert again == first and meta["cached_tokens"] == 0
    assert shared_by_both(rollout, next(asked))


def test_weights_when_a_trainer_brings_others_then_ranks_lend_what_these_compute_and_nothing_of_before(
    rollout, asked, handed_over
):
    ids = next(asked)
    old = shared_by_both(rollout, ids)
    weights = load_file(models.ensure(models.MOE) / "model.safetensors")

    def train(tensor):
        told = [handed_over({TRAINED: tensor}) for _ in range(NUM_SHARDS)]
        told_in_turn(
            rollout,
            ("/release_memory_occupation", {}),
            ("/resume_memory_occupation", {"tags": ["weights", "cuda_graph"]}),
            ("/begin_weight_update", {}),
            ("/update_weights_from_tensor", {"serialized_named_tensors": told, "flush_cache": False}),
            ("/end_weight_update", {}),
            ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
        )

    train(-weights[TRAINED])
    assert len({rank["namespace"] for rank in rollout.ranks().values()}) == 1
    new, meta = rollout.generate(ids, rank=1)
    assert new != old and meta["cached_tokens"] == 0
    again, meta = rollout.generate(ids, rank=0)
    assert again == new and meta["cached_tokens_details"]["peer"] > 0
    train(weights[TRAINED])
    assert shared_by_both(rollout, ids) == old


def test_pair_when_both_its_servers_take_new_weights_then_it_finds_nothing_of_before_and_shares_what_it_computes(
    alone, tmp_path, asked
):
    """Another checkpoint in the same shape would do; the same one shows that the old pages are not found by their
    content. The answer's pages are the decode server's: the prefill server has them from the store."""
    model = models.ensure(models.LLAMA)
    common = ("--banyan-plan", "move", "--max-total-tokens", "8000")
    spared = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
    pair = Pair(
        *("pair", "on", model, tmp_path),
        store=tmp_path / "store",
        prefill_args=common,
        decode_args=(*common, *spared),
        kind=ForkedServer,
    )
    with pair, pair.routed() as url:
        asked_of, ids = SimpleNamespace(pair=pair, router=Engine(url)), next(asked)

        def second_turn():
            """Its answer; what was found is the answer's pages too."""
            grown, num_pages = first_turn(asked_of, ids)
            answer = asked_of.router.generate([*grown, *ids[:40]], num_tokens=4)
            assert num_found_pages(answer["meta_info"]["cached_tokens_details"]) >= num_pages > 0
            return grown, answer["output_ids"]

        before = second_turn()
        for server in pair.servers:
            told_in_turn(Client(server), ("/update_weights_from_disk", {"model_path": str(model), "flush_cache": True}))
        again = asked_of.router.generate(before[0], num_tokens=1)
        assert again["meta_info"]["cached_tokens"] == 0
        for server in pair.servers:
            told_in_turn(Client(server), ("/flush_cache", {}))
        assert second_turn() == before
