# SPDX-License-Identifier: Apache-2.0
"""SGLang's page keys: what they start from, and the extension that it computes them with."""

from __future__ import annotations

from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from banyan.refusals.start import page_hash_refusal
from banyan.sglang_plugin import runtime


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """What the keys of a prompt start from; None when it is in nobody's namespace."""
    seed = storage_namespace_seed(extra_key, cache_salt)
    return bytes.fromhex(seed) if seed is not None else None


def tokens_ahead(algorithm: str | None, *, has_states: bool) -> int:
    """How many tokens behind a page its key depends on, by the way to draft. With a draft of EAGLE's kind SGLang makes
    keys of bigrams, for a row of the draft's cache depends on the token behind it as well; of a model with states it
    does not."""
    return 1 if SpeculativeAlgorithm.from_string(algorithm).is_eagle() and not has_states else 0


def prepare(page_tokens: int) -> None:
    """Hash one page. SGLang compiles its hash when it is first asked, once per machine and for seconds: not while a
    user waits for the first answer. Refuses when it cannot be compiled: SGLang itself would fail at that request.
    """
    try:
        get_hash_str([0] * page_tokens, None, page_size=page_tokens)
    except RuntimeError as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        runtime.refuse(page_hash_refusal(cause))
