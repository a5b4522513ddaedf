# SPDX-License-Identifier: Apache-2.0
"""Which pages are the same as this rank's: the namespace, from what the server was given and what SGLang made of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_parallel, get_spec

from banyan.config import Config
from banyan.layout import MemberSlots, Namespace, PageLayout
from banyan.sglang_plugin.rank.store_access import weights_digest


class Identity:
    """What tells this rank's pages from others, and stays as it is; the weights' epochs come on top."""

    def __init__(self, server_args: Any, config: Config, *, server: str, pool: Any, drafts: Sequence[Any]) -> None:
        """Refuses weights that cannot be told from others, where pages outlive the server or leave it."""
        self._server_args = server_args
        self._server = server
        self._pool = pool
        self._weights_sha256 = ""
        if config.knows_weights:
            self._weights_sha256 = weights_digest(config, server_args.model_path, server_args.revision)
        self._config_sha256 = _config_digest(server_args)
        self._draft = _draft_identity(drafts, config) if drafts else ()

    def namespace(
        self,
        page: PageLayout,
        *,
        page_tokens: int,
        weights_epoch: int,
        apart: str,
        member_slots: MemberSlots,
        window: tuple[str, ...],
    ) -> Namespace:
        """Under the weights of this epoch. ``apart``: a name that no other rank has, or nothing. ``window``: which
        layers the pages are of, where not of all."""
        args, pool, parallel = self._server_args, self._pool, get_parallel()
        return Namespace(
            # Equal weights are equal whatever their folder is called.
            model="" if self._weights_sha256 else args.model_path,
            revision="" if self._weights_sha256 else args.revision or "",
            weight_version=str(args.weight_version),
            weights_sha256=self._weights_sha256,
            weights_epoch=weights_epoch,
            server=self._server + apart if weights_epoch else "",
            engine=f"sglang {importlib.metadata.version('sglang')}",
            model_config_sha256=self._config_sha256,
            kv_dtype=str(pool.dtype),
            page_tokens=page_tokens,
            first_layer=pool.start_layer,
            num_layers=pool.layer_num,
            page=page.identity(),
            pool_layout=_layout_of(pool),
            attn_tp_size=1 if member_slots.is_replicated else parallel.attn_tp_size,
            attn_tp_rank=0 if member_slots.is_replicated else parallel.attn_tp_rank,
            attn_cp_size=parallel.attn_cp_size,
            attn_cp_rank=parallel.attn_cp_rank,
            draft=self._draft,
            window=window,
        )


def _layout_of(pool: Any) -> str:
    return f"{type(pool).__name__}/{getattr(pool, 'kv_cache_layout', 'latent')}"


def _draft_identity(drafts: Sequence[Any], config: Config) -> tuple[str, ...]:
    """Whose rows lie behind the model's. A page that was filled without a draft, or by another one, is another page."""
    spec = get_spec()
    path, revision = spec.speculative_draft_model_path, spec.speculative_draft_model_revision or ""
    # The draft is computed from the model's own states, so the model's weights tell them too.
    who = (weights_digest(config, path, revision or None),) if config.knows_weights else (path, revision)
    pools = (f"{_layout_of(pool)}/{pool.dtype}/{pool.layer_num}" for pool in drafts)
    return (spec.speculative_algorithm, *who, str(spec.speculative_draft_model_quantization), *pools)


def _config_digest(server_args: Any) -> str:
    """Digest of what changes a model's KV beside its weights: the overrides and the quantisation asked for."""
    asked = [server_args.json_model_override_args, server_args.dtype, server_args.quantization]
    if server_args.quantization_param_path is not None:
        # Scales of the KV cache: what they are counts, not where they lie.
        asked.append(hashlib.sha256(Path(server_args.quantization_param_path).read_bytes()).hexdigest())
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()
