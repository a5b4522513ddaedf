# SPDX-License-Identifier: Apache-2.0
"""SGLang's page hash is ready before the first request, and a machine that cannot have it is told so at the start."""

import random
from array import array

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str

from banyan import _native
from banyan.sglang_plugin import page_hash
from banyan.sglang_plugin.runtime import Refused


def test_prepare_when_the_extension_cannot_be_built_then_the_server_refuses_and_says_what_to_install(
    monkeypatch, capsys
):
    def fail(*args, **kwargs):
        raise RuntimeError("Failed to load") from OSError("openssl/sha.h: No such file\nmore")

    monkeypatch.setattr(page_hash, "get_hash_str", fail)
    with pytest.raises((SystemExit, Refused)):
        page_hash.prepare(16)
    line = capsys.readouterr().err
    assert "openssl/sha.h: No such file)" in line and "libssl-dev" in line and line.count("\n") == 1


@pytest.mark.parametrize("namespace", [(None, None), ("adapter", None), (None, "tenant"), ("adapter", "tenant")])
def test_namespace_seed_when_keys_start_from_it_then_they_are_sglangs(namespace):
    page_hash.prepare(16)
    seed = page_hash.namespace_seed(*namespace)
    tokens = list(range(100, 148))
    ours = _native.PageKeys(16, 4).of(seed, np.array(tokens, dtype=np.int64))
    assert list(ours) == get_hash_str(tokens, seed.hex() if seed else None, page_size=16)


def of_text(drawn):
    return [drawn.randrange(1 << drawn.choice((8, 17, 32))) for _ in range(drawn.randrange(300))]


def of_text_and_images(drawn):
    """Text with an item or two in it, each as SGLang writes it: by the hash of its content or by an identity."""
    tokens = of_text(drawn)
    for _ in range(drawn.randrange(1, 3)):
        item = MultimodalDataItem(modality=Modality.IMAGE)
        if drawn.random() < 0.5:
            item.set_hash(drawn.getrandbits(64))
        else:
            item.set_identity(drawn.randbytes(32))
        at = drawn.randrange(len(tokens) + 1)
        tokens[at:at] = item.padding_sequence(drawn.randrange(1, 100))
    return tokens


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("is_bigram", [False, True], ids=["tokens", "bigrams"])
@pytest.mark.parametrize("draw", [of_text, of_text_and_images])
def test_keys_when_a_prompt_is_drawn_then_they_are_sglangs(page_tokens, is_bigram, draw):
    drawn = random.Random(page_tokens)
    ahead = page_hash.tokens_ahead("EAGLE" if is_bigram else None, has_states=False)
    # It remembers little, so that chunks are forgotten, and found, between the cases.
    page_keys = _native.PageKeys(page_tokens, 8, ahead)
    prompts = [[]]
    for _ in range(1000 // 3 + 1):
        start = drawn.choice(prompts)[: drawn.randrange(400)] if drawn.random() < 0.5 else []
        tokens = start + draw(drawn)
        prompts.append(tokens)
        seed = drawn.choice((None, bytes(drawn.randrange(256) for _ in range(32))))
        key = RadixKey(array("q", tokens), is_bigram=is_bigram).page_aligned(page_tokens)
        # SGLang gives one key for nothing, and a list of them for pages.
        theirs = get_hash_str(key, seed.hex() if seed else None, page_size=page_tokens) if len(key) else []
        assert page_keys.of(seed, np.array(tokens, dtype=np.int64)) == list(theirs), (len(tokens), seed)


@pytest.mark.parametrize(
    "algorithm, ahead", [(None, 0), ("NGRAM", 0), ("STANDALONE", 0), ("EAGLE", 1), ("eagle3", 1), ("NEXTN", 1)]
)
def test_keys_when_a_draft_of_eagles_kind_runs_then_they_look_one_token_ahead_but_beside_states(algorithm, ahead):
    assert page_hash.tokens_ahead(algorithm, has_states=False) == ahead
    assert page_hash.tokens_ahead(algorithm, has_states=True) == 0


def test_keys_when_a_token_is_negative_then_neither_sglang_nor_banyan_has_one():
    with pytest.raises(ValueError, match="negative"):
        _native.PageKeys(16, 8).of(None, np.full(16, -1, dtype=np.int64))
    with pytest.raises(IndexError):
        get_hash_str(array("q", [-1] * 16), None, page_size=16)
