# SPDX-License-Identifier: Apache-2.0
"""The page size of a server whose user names none: the one that SGLang chooses, wherever such pages can be shared.

SGLang picks attention backends by the size of a page, and the size of a page by the backend. So it is asked what it
would do without Banyan, on a copy of the arguments. Where that is a page of one token, which cannot be shared, sizes
are tried on further copies until SGLang keeps its backends.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of, resolved_view

from banyan import config
from banyan.refusals.speculation import branches_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher.model import has_windows

logger = logging.getLogger("banyan")

Resolve = Callable[[Any], None]
SIZES = (config.DEFAULT_PAGE_TOKENS, 32, 64, 128)
"""Tokens of a page, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What SGLang makes of some arguments: tokens of a page, and attention backends by what they are for; ``refused``:
    the line for a rank that would end at its first draft."""

    page_tokens: int
    prefill: str | None
    decode: str | None
    drafts: str | None = None
    refused: str | None = None

    def words(self) -> str:
        """For the log and ``banyan doctor``."""
        attention = self.prefill if self.prefill == self.decode else f"{self.prefill} (prefill), {self.decode} (decode)"
        return f"page size {self.page_tokens}, attention {attention}" + (
            f", {self.drafts} (drafts)" if self.drafts else ""
        )

    def keeps(self, expected: Choice) -> bool:
        """Whether the backends are the same."""
        return replace(self, page_tokens=0) == replace(expected, page_tokens=0)


def choice_of(server_args: Any) -> Choice:
    """Of arguments that are resolved."""
    view = resolved_view(server_args)
    prefill, decode = attention_backends_of(view)
    return Choice(view.page_size, prefill, decode, view.speculative_draft_attention_backend, _refused(view))


def _refused(view: Any) -> str | None:
    if view.speculative_algorithm is None:
        return None
    prefill, decode = attention_backends_of(view)
    verifies = decode if view.speculative_attention_mode == "decode" else prefill
    num_branches = view.speculative_eagle_topk or 1
    line = branches_refusal(num_branches=num_branches, attention=verifies, page_tokens=view.page_size)
    # The model is looked at where that matters: a configuration may not be here yet.
    return line if line is not None and has_windows(model_config_of(view)) else None


def compared(found: Choice, expected: Choice | None) -> dict[str, Any]:
    """For ``banyan doctor``: what SGLang chose, and would without Banyan; None where that is not known."""
    return {
        "with": found.words(),
        "without": None if expected is None else expected.words(),
        "is_kept": expected is None or (found.keeps(expected) and expected.page_tokens in (1, found.page_tokens)),
    }


def alone(resolve: Resolve, server_args: Any) -> Choice | None:
    """What SGLang would choose without Banyan; None where it refuses these arguments. They are not resolved yet."""
    without = {
        "enable_unified_cache_external_linker": False,
        "unified_cache_external_linker_backend": "mooncake",
        "unified_cache_external_linker_config": None,
    }
    return _tried(resolve, server_args, **without)


def settle(resolve: Resolve, server_args: Any, expected: Choice | None, wanted: config.Config) -> None:
    """Set the page size, where the user has not and SGLang alone would choose pages of one token. It is the same with
    sharing and without, unless SGLang knows this model with pages of one token only: then nothing is shared.

    ``expected``: what it would choose, of ``alone``.
    """
    if server_args.page_size is not None or (expected is not None and expected.page_tokens > 1):
        return
    fields = _first_that_keeps(resolve, server_args, expected) if expected is not None else None
    if fields is None:
        fields = {"page_size": config.DEFAULT_PAGE_TOKENS}
        if not wanted.shares and _tried(resolve, server_args, **fields) is None:
            return
        if expected is not None:
            logger.warning("banyan: SGLang alone: %s; with pages of several tokens it changes that", expected.words())
    for name, value in fields.items():
        setattr(server_args, name, value)


def _first_that_keeps(resolve: Resolve, server_args: Any, expected: Choice) -> dict[str, Any] | None:
    """The first fields with which SGLang keeps its backends; None when there are none."""
    for fields in _proposals(server_args, expected):
        found = _tried(resolve, server_args, **fields)
        if found is not None and found.page_tokens > 1 and found.keeps(expected):
            return fields
    return None


def _proposals(server_args: Any, expected: Choice) -> Iterable[dict[str, Any]]:
    yield from ({"page_size": size} for size in SIZES)
    named: dict[str, Any] = {"attention_backend": expected.prefill}
    if expected.prefill != expected.decode:
        named = {"prefill_attention_backend": expected.prefill, "decode_attention_backend": expected.decode}
    if expected.drafts is not None:
        named["speculative_draft_attention_backend"] = expected.drafts
    if server_args.attention_backend is None:
        yield from ({"page_size": size, **named} for size in SIZES)


def _tried(resolve: Resolve, server_args: Any, **fields: Any) -> Choice | None:
    """What SGLang makes of a copy with these fields."""
    tried = copy.deepcopy(server_args)
    tried.__dict__.pop(runtime.BOOKKEEPING, None)
    for name, value in fields.items():
        setattr(tried, name, value)
    previous = logging.root.manager.disable
    # It is said when it is done.
    logging.disable(logging.CRITICAL)
    try:
        with config.kept_environment():
            resolve(tried)
        found = choice_of(tried)
        return found if found.refused is None else None
    except Exception:  # noqa: BLE001 - whatever SGLang raises over its arguments, it raises again when it is meant
        return None
    finally:
        logging.disable(previous)
