# SPDX-License-Identifier: Apache-2.0
"""Which pages are the same as this rank's: the namespace, from what the server was given and what SGLang made of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from sglang.srt.arg_groups.fields.model import Model
from sglang.srt.runtime_context import get_lora, get_parallel, get_spec
from sglang.srt.server_args import ServerArgs

from banyan.config import Config, external_models, settings_of_computing
from banyan.layout import MemberSlots, Namespace, PageLayout
from banyan.layout.checkpoint import is_by_content
from banyan.refusals.start import weights_refusal
from banyan.sglang_plugin import model_files, runtime
from banyan.sglang_plugin.pools.kind_pools import KindPools
from banyan.sglang_plugin.rank.store_access import weights_digest

_TOLD_OTHERWISE = frozenset(
    """model_path revision json_model_override_args dtype quantization quantization_param_path kv_cache_dtype""".split()
)
"""By the digest of the weights, by the pool, or below."""

_OF_LOADING = frozenset(
    """startup_weight_load_mode custom_weight_loader weight_loader_disable_mmap weight_loader_prefetch_checkpoints
    weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
    remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
    remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
    remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port modelexpress_config
    download_dir model_checksum delete_ckpt_after_loading checkpoint_engine_wait_weights_before_ready
    weight_cache_mode weight_cache_socket weight_cache_timeout modelopt_checkpoint_restore_path
    modelopt_checkpoint_save_path modelopt_export_path""".split()
)
"""Of SGLang's flags of a model, those that say how its files are read, or what is to be left beside them. Where other
weights come of it, pages that must know them are refused (``banyan.refusals``)."""

_OF_COMPUTING = frozenset(
    """forward_hooks rl_on_policy_target flashinfer_mxfp4_moe_precision enable_w4a4_mxfp4_megamoe
    deepep_dispatcher_output_dtype flashinfer_a2a_dispatch_type enable_quant_communications
    enable_precise_embedding_interpolation experts_shared_outer_loras""".split()
)
"""Of its other flags, those with which more than a last bit of KV differs."""

_COUNTED = {field.name for field in msgspec.structs.fields(Model)} - _TOLD_OTHERWISE - _OF_LOADING | _OF_COMPUTING
"""A flag of the model's that nobody has thought of yet counts."""

USUAL = {field.name: field.default for field in msgspec.structs.fields(ServerArgs) if field.name in _COUNTED}
"""What counts beside overrides and type, as SGLang has it where nobody asks for anything else."""

_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_UNSCALED = frozenset({"torch_native", "flex_attention"})
"""These write FP8 as if there were no scales; all others divide by them."""

_NAME_FILES = frozenset({"decrypted_config_file", "decrypted_draft_config_file", "rl_quant_profile"})
"""What such a file says counts, not where it lies."""


class Identity:
    """What tells this rank's pages from others, and stays as it is; what the weights go through comes on top."""

    def __init__(self, server_args: Any, config: Config, pools: KindPools, carried: Mapping[str, Any]) -> None:
        """Refuses weights that cannot be told from others, where pages outlive the server or leave it. ``carried``:
        what the main process left, with the files that were to be loaded as they were before."""
        self._server_args = server_args
        self._server = carried["server"]
        self._engine = carried["engine"]
        self._pool = pools.pool
        self._layers = pools.identity
        self.weights_sha256 = ""
        self._adapters: list[str] = []
        if config.knows_weights:
            adapters = [adapter.lora_id for adapter in get_lora().lora_paths or ()]
            self._adapters = sorted(filter(is_by_content, adapters))
            self.weights_sha256 = weights_digest(config, server_args.model_path, server_args.revision)
            if package := external_models():
                runtime.refuse(weights_refusal(f"SGLANG_EXTERNAL_MODEL_PACKAGE={package} is code that nobody digests"))
        self._config_sha256 = _config_digest(server_args, str(pools.pool.dtype))
        self._draft = _draft_identity(pools.drafts, config) if pools.drafts else ()
        changed = model_files.changed(carried["noted"]) if config.knows_weights else None
        if changed is not None:
            runtime.refuse(weights_refusal(f"{changed} has changed since the server was started: start it again"))

    def computing(self, weights: str) -> str:
        """Digest of what KV is computed with, however it lies in memory: the engine, these weights, the adapters of the
        start, and what else was asked for. A page key says which adapter this server has, and not which one another has
        used."""
        text = json.dumps([self._engine, weights, self._config_sha256, self._adapters])
        return hashlib.sha256(text.encode()).hexdigest()

    def namespace(
        self, page: PageLayout, *, page_tokens: int, changes: str, content: str, member_slots: MemberSlots
    ) -> Namespace:
        """``changes``: what the weights have gone through since the start, or nothing. ``content``: the digest of what
        they are then, where it is known."""
        args, pool, parallel = self._server_args, self._pool, get_parallel()
        return Namespace(
            # Equal weights are equal whatever their folder is called.
            model="" if self.weights_sha256 else args.model_path,
            revision="" if self.weights_sha256 else args.revision or "",
            weight_version=str(args.weight_version),
            weights_sha256=self.weights_sha256,
            weights_epoch=int(changes != ""),
            server=f"weights {content}" if content else self._server + changes if changes else "",
            engine=self._engine,
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
            window=self._layers,
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


def _config_digest(server_args: Any, kv_dtype: str) -> str:
    """Digest of what changes a model's KV beside its weights: the overrides, the quantisation, and what else was asked
    for and is not usual."""
    asked = [server_args.json_model_override_args, server_args.dtype, server_args.quantization]
    if server_args.quantization_param_path is not None:
        # Scales of the KV cache.
        asked.append(_content(server_args.quantization_param_path))
    for name, usual in sorted(USUAL.items()):
        value = getattr(server_args, name)
        if value != usual:
            asked.append([name, _content(value) if name in _NAME_FILES else value])
    asked += [list(setting) for setting in settings_of_computing().items()]
    if "float8" in kv_dtype:
        asked += sorted(_UNSCALED & {getattr(server_args, name) for name in _BACKENDS})
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _content(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
