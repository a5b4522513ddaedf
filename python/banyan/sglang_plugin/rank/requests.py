# SPDX-License-Identifier: Apache-2.0
"""The requests of this rank by id, and what Banyan knows about each of their prefixes.

Invariants
  1. A request has an id of this rank's own (``banyan.core.request_id``) that no other request ever has. The client's,
     ``rid``, may come twice: what was remembered of one request is never found for another.
  2. Requests are held weakly: one that SGLang has forgotten is forgotten here.

SGLang's linker contract passes ``rid``: ``id_of_rid`` says whose it is now. All other functions take the own id.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from banyan import _native, telemetry
from banyan.core import Fetch, PrefixSpan, request_id
from banyan.layout import cacheable_tokens
from banyan.layout.checkpoint import is_by_content
from banyan.planner import RequestFacts
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.page_hash import namespace_seed
from banyan.telemetry import Parting, Why

NUM_REMEMBERED_CHUNKS = 4096
"""Of 32 pages each: at 16 tokens a page 2 M tokens of prompts."""

_tokens_ahead = 0
_page_keys: _native.PageKeys | None = None
_numbers = itertools.count()
_by_id: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_by_rid: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_inserting: Any = None
"""The request whose pages SGLang is putting into its tree."""


def look_ahead(num_tokens: int) -> None:
    """From now on the key of a page depends on so many tokens behind it."""
    global _tokens_ahead, _page_keys
    if num_tokens != _tokens_ahead:
        _tokens_ahead, _page_keys = num_tokens, None


def tokens_ahead() -> int:
    """How many tokens behind a page its key depends on."""
    return _tokens_ahead


def register(req: Any) -> None:
    """Give the request an id of its own, and know it for as long as SGLang does."""
    req.banyan_id = request_id(req.rid, next(_numbers))
    _by_id[req.banyan_id] = req
    _by_rid[req.rid] = req


def is_known(req: Any) -> bool:
    """Whether this very request has been registered."""
    return hasattr(req, "banyan_id")


def id_of(req: Any) -> str:
    """The own id of a request; of one that was not registered its ``rid``."""
    return getattr(req, "banyan_id", req.rid)


def id_of_rid(rid: str) -> str:
    """The own id of the last request of this ``rid``, while SGLang has not forgotten it; else ``rid``."""
    return getattr(_by_rid.get(rid), "banyan_id", rid)


def when_gone(request: str, tell: Callable[[str], None]) -> None:
    """Call ``tell`` with this id when SGLang has forgotten the request: answered, aborted or failed."""
    req = _by_id.get(request)
    if req is not None:
        weakref.finalize(req, tell, request).atexit = False


def record_span(request: str, span: PrefixSpan) -> None:
    """Note what the rank itself saw; it replaces the dispatcher's hint."""
    req = _by_id.get(request)
    if req is not None:
        req.dp_origin_kv_len = span.origin_tokens
        req.dp_max_kv_len = span.max_tokens
        req.dp_max_kv_rank = span.max_rank


def span_of(req: Any) -> PrefixSpan | None:
    """What was seen of a request's prefix; None for one that did not come this way."""
    if not hasattr(req, "dp_max_kv_len"):
        return None
    return PrefixSpan(req.dp_origin_kv_len, req.dp_max_kv_len, req.dp_max_kv_rank)


def find(request: str) -> Any | None:
    """SGLang's request of this id, while SGLang knows it."""
    return _by_id.get(request)


def all_known() -> list[Any]:
    """SGLang's requests that it has not forgotten."""
    return list(_by_id.values())


def traced(request: str) -> Any | None:
    """The request, when SGLang traces it on this rank."""
    req = _by_id.get(request)
    return req if is_traced(req) else None


def is_traced(req: Any) -> bool:
    """Whether SGLang traces this request."""
    trace = getattr(getattr(req, "time_stats", None), "trace_ctx", None)
    # Where SGLang does not trace, this is an object that has every attribute, and it is false.
    return trace is not None and trace.tracing_enable is True and runtime.is_on("57-trace-slice")


def note_prompt(
    request: str, pages: bytes, asked_before_tokens: int | None, look: Callable[[Any], Parting | None]
) -> None:
    """The numbers of its prompt's pages, as far as a cache may supply them; how many of its first tokens were in
    prompts of before, where somebody knows; and where it parts from its session's last ones, as ``look`` finds."""
    req = _by_id.get(request)
    if req is not None:
        req.banyan_pages = pages
        req.banyan_asked_before_tokens = asked_before_tokens
        req.banyan_parting = look(req)


def note_new(request: str, num_pages: int, page_tokens: int) -> None:
    """Nobody has asked before for the last of so many pages of its prompt. Where the next page has no token of the
    answer, that says nothing of it."""
    req = _by_id.get(request)
    if req is not None and len(req.origin_input_ids) < (num_pages + 1) * page_tokens:
        req.banyan_new_pages = num_pages


def pages_of(req: Any) -> bytes:
    """What was noted of its pages; none of a prompt of less than a page."""
    return getattr(req, "banyan_pages", b"")


def parting_of(req: Any) -> Parting | None:
    """Where its prompt has parted from its session's last ones; None where it has not."""
    return getattr(req, "banyan_parting", None)


def why_computed(req: Any, cached_tokens: int, page_tokens: int, unmoved: tuple[int, Why]) -> dict[Why, int]:
    """Why the tokens of its prompt that were not cached were computed; ``unmoved``: as the planner tells it."""
    prompt_tokens = len(req.origin_input_ids)
    span = span_of(req)
    return telemetry.why_computed(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        cacheable_tokens=cacheable_tokens(prompt_tokens, page_tokens, _tokens_ahead),
        found_tokens=0 if span is None else span.max_tokens,
        asked_before_tokens=getattr(req, "banyan_asked_before_tokens", None),
        planned_tokens=unmoved[0],
        unplanned=unmoved[1],
    )


def record_fetch(fetch: Fetch) -> None:
    """Note how many tokens of the request come from where: peer, host, storage, remote."""
    req = _by_id.get(fetch.request)
    if req is not None:
        req.banyan_tokens = {kind.value: num_tokens for kind, num_tokens in fetch.tokens.items()}


def prompt_keys(request: str, page_tokens: int) -> list[str] | None:
    """The keys of all pages that a cache may supply for this request; None when it has none that Banyan could know, or
    brings vectors for some of its tokens, for which SGLang takes nothing from its cache."""
    req = _by_id.get(request)
    if req is None or req.positional_embed_overrides is not None:
        return None
    tokens = req.origin_input_ids
    num_tokens = cacheable_tokens(len(tokens), page_tokens, _tokens_ahead)
    return _keys(req, tokens[: num_tokens + _tokens_ahead], page_tokens)


def salt_of(request: str) -> str | None:
    """Apart from whose prompts its own is kept; None: in nobody's namespace."""
    req = _by_id.get(request)
    salt: str | None = None if req is None else req.cache_salt
    return salt


def around_checkpoint_into_tree(original: Callable[..., None], tree: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang puts the pages of a request into its tree, and offers the linker those that are new there."""
    global _inserting
    _inserting = req
    try:
        original(tree, req, *args, **kwargs)
    finally:
        _inserting = None


def inserted_chain(page_tokens: int) -> list[str] | None:
    """The keys of all pages, answer included, of the request whose pages are being offered."""
    return None if _inserting is None else _grown_keys(_inserting, page_tokens)


def inserted_answer(page_tokens: int) -> tuple[str | None, str, list[str]] | None:
    """Of a request with a new prompt that has ended and whose pages are being offered: its salt, the last page of its
    prompt and those of its answer. It is told once."""
    req = _inserting
    num_pages = getattr(req, "banyan_new_pages", 0)
    if not num_pages or not req.finished():
        return None
    req.banyan_new_pages = 0
    if len(req.origin_input_ids) + len(req.output_ids) < (num_pages + 1) * page_tokens + _tokens_ahead:
        return None
    chain = _grown_keys(req, page_tokens)
    return None if chain is None else (req.cache_salt, chain[num_pages - 1], chain[num_pages:])


def is_lasting_inserted() -> bool:
    """Whether the pages that are being offered are known to mean the same to the next server."""
    return _inserting is not None and _is_lasting(_inserting)


def is_of_this_server(request: str) -> bool:
    """Whether the request is known to be for a LoRA adapter whose id means something to this server only."""
    req = _by_id.get(request)
    return req is not None and not _is_lasting(req)


def _is_lasting(req: Any) -> bool:
    return req.lora_id is None or is_by_content(req.lora_id)


def _grown_keys(req: Any, page_tokens: int) -> list[str] | None:
    # Arrays of SGLang's: a list of them would make an object of each token.
    tokens = np.concatenate([np.asarray(part, dtype=np.int64) for part in (req.origin_input_ids, req.output_ids)])
    return _keys(req, tokens, page_tokens)


def _keys(req: Any, tokens: Sequence[int] | np.ndarray, page_tokens: int) -> list[str] | None:
    return page_keys(tokens, page_tokens, extra_key=req.extra_key, cache_salt=req.cache_salt)


def page_keys(
    tokens: Sequence[int] | np.ndarray, page_tokens: int, *, extra_key: str | None, cache_salt: str | None
) -> list[str] | None:
    """The keys of all complete pages of tokens; None where Banyan could not know them."""
    global _page_keys
    if _page_keys is None:
        _page_keys = _native.PageKeys(page_tokens, NUM_REMEMBERED_CHUNKS, _tokens_ahead)
    try:
        seed = namespace_seed(extra_key, cache_salt)
        return _page_keys.of(seed, np.asarray(tokens, dtype=np.int64))
    except (ValueError, OverflowError):
        # A negative token, or one of more than 63 bits, or a salt that is no Unicode: SGLang has no key for its page.
        return None


def facts_of_all_pages(request: str, page_tokens: int) -> RequestFacts:
    """As ``facts``, where all pages of ``prompt_keys`` are meant: how far SGLang is going to look is not settled when a
    request has just come."""
    return _facts(request, page_tokens, lambda req, num_tokens: max(num_tokens - 1, 0))


def facts(request: str, page_tokens: int) -> RequestFacts:
    """What the planner has to know of the request. Its prompt has the answer so far when it is computed again."""
    return _facts(request, page_tokens, lambda req, num_tokens: req._compute_max_prefix_len(num_tokens))


def _facts(request: str, page_tokens: int, most_cached: Callable[[Any, int], int]) -> RequestFacts:
    req = _by_id.get(request)
    if req is None:
        return RequestFacts(request, None, page_tokens, None)
    # SGLang's own list of both is made later: when a request has just come, and by policies that look at every prefix
    # in the queue (lpm, dfs-weight), it is still empty or of the last round.
    num_tokens = len(req.origin_input_ids) + len(req.output_ids)
    most = most_cached(req, num_tokens)
    return RequestFacts(request, num_tokens, page_tokens, req.banyan_asked, req.dp_max_kv_rank, _tokens_ahead, most)
