# SPDX-License-Identifier: Apache-2.0
"""A second look, in the main process, when SGLang has resolved its arguments: at what it made of the flags, and at the
model. Nothing has been started yet, and no weights have been read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of, resolved_view
from sglang.srt.arg_groups.overrides import supports_mamba_cache_extra_buffer
from sglang.srt.configs.model_config import ModelConfig

from banyan import feature_list as features
from banyan.config import Config
from banyan.layout import Layout
from banyan.pacing.lockstep import READER_PATIENCE_S
from banyan.refusals import layout_refusal, refusals
from banyan.refusals.kinds import STRATEGY, kept_states_refusal, kind_refusals
from banyan.refusals.models import ModelFacts, draft_vocabulary_refusal, model_refusal
from banyan.refusals.modes import mode_refusals, no_cache_refusal
from banyan.refusals.speculation import layers_of_steps_refusal
from banyan.refusals.start import chunk_refusal, undecided_refusal
from banyan.refusals.tenant_server import tenant_refusals
from banyan.sglang_plugin import model_files, page_hash, runtime
from banyan.sglang_plugin.launcher import flags, page_size
from banyan.sglang_plugin.launcher.model import architecture_of, model_facts

logger = logging.getLogger("banyan")


def around_resolve_once(original: Callable[[Any], None], server_args: Any) -> None:
    flags.take_environment(server_args)
    carried = runtime.bookkeeping(server_args)
    if carried is None or "choices" in carried:
        # SGLang calls again, in other processes too, and does nothing then.
        original(server_args)
        return
    # The CPU engine's attention is Banyan's own, with pages of any size.
    expected = None if runtime.device_of(server_args) == "cpu" else page_size.alone(original, server_args)
    page_size.settle(original, server_args, expected, carried["config"])
    _resolve(original, server_args, carried)
    _refuse_cut_pages(resolved_view(server_args))
    found = page_size.choice_of(server_args)
    if found.refused is not None:
        runtime.refuse(found.refused)
    carried["choices"] = page_size.compared(found, expected)
    logger.info("banyan: %s", found.words())


def _resolve(original: Callable[[Any], None], server_args: Any, carried: dict[str, Any]) -> None:
    if not carried["config"].shares:
        original(server_args)
        return
    try:
        original(server_args)
    except ValueError as error:
        # Upstream names a flag of the linker's here, which nobody gave.
        if "--enable-unified-cache-external-linker" not in str(error):
            raise
        runtime.refuse(no_cache_refusal(asked=_asked(resolved_view(server_args)), reason=str(error)))
    except AssertionError as error:
        if "no_buffer" not in str(error):
            raise
        runtime.refuse(kept_states_refusal(str(error), _strategies(server_args)))
    try:
        _decide(server_args, carried)
    except Exception as error:
        # What could not be looked at is not shared.
        logger.exception("banyan: these arguments cannot be judged")
        runtime.refuse(undecided_refusal(error))


def _refuse_cut_pages(view: Any) -> None:
    """Refuse what SGLang asserts later without naming a flag. The pages may be of Banyan's choice, shared or not."""
    chunk_tokens = view.chunked_prefill_size or 0
    if chunk_tokens <= 0 or view.disaggregation_mode == "decode":
        return
    line = chunk_refusal(chunk_tokens=chunk_tokens, page_tokens=view.page_size, num_ranks=view.attn_dp_size)
    if line is not None:
        runtime.refuse(line)


def _strategies(server_args: Any) -> tuple[str, ...]:
    """Of SGLang, those that keep states at the ends of pages of this model."""
    view = resolved_view(server_args)
    return (STRATEGY,) if supports_mamba_cache_extra_buffer(view, model_config_of(view).hf_config) else ()


def _decide(server_args: Any, carried: dict[str, Any]) -> None:
    """Refuse what cannot be shared, and leave for the other processes what they need to know."""
    view, wanted = resolved_view(server_args), carried["config"]
    layout = carried["layout"] = _layout(view, carried["layout"])
    model = _model(view, layout)
    asked = flags.asked_of(view, wanted, layout, model)
    reasons = _reasons(view, wanted, layout, model, features.refusals(carried["off"], asked))
    if reasons:
        runtime.refuse(*reasons)
    _warn_of_watchdogs(view)
    # Dispatcher and ranks make keys by the same number, or find nothing of each other's.
    carried["tokens_ahead"] = page_hash.tokens_ahead(
        view.speculative_algorithm, has_states=model is not None and model.has_states
    )
    carried["needed"] = features.needed(asked)
    # Ranks on a CPU may add some.
    carried["num_kv_heads"] = 0 if model is None else model.num_kv_heads
    if model is not None and (model.has_window or model.has_states):
        flags.reserve_window_slots(carried)
    if wanted.knows_weights:
        loaded = _loaded(view)
        carried["noted"] += [model_files.note(path, revision) for path, revision in loaded if path]


def _warn_of_watchdogs(view: Any) -> None:
    """SGLang's count while a busy rank waits for readers of its pages."""
    asked_s = {"--watchdog-timeout": view.watchdog_timeout, "--soft-watchdog-timeout": view.soft_watchdog_timeout}
    for flag, timeout_s in asked_s.items():
        if timeout_s is not None and timeout_s <= READER_PATIENCE_S:
            line = "banyan: %s %g: a rank that waits up to %g s for pages that others read is taken to hang: use more"
            logger.warning(line, flag, timeout_s, READER_PATIENCE_S)


def _loaded(view: Any) -> Iterator[tuple[str | None, str | None]]:
    """What SGLang loads, by path and revision, and what a namespace is made of besides; adapters come later."""
    yield view.model_path, view.revision
    yield view.speculative_draft_model_path, view.speculative_draft_model_revision
    for name in ("quantization_param_path", "rl_quant_profile", "decrypted_config_file", "decrypted_draft_config_file"):
        yield getattr(view, name), None


def _layout(view: Any, asked: Layout) -> Layout:
    """What SGLang has made of the flags. It may divide a rank among its shards in another way than they say, by CP in
    place of TP; the rank table that there is fits no other ranks."""
    made = flags.layout_of(view)
    if made.first_member_slots != asked.first_member_slots or made.num_member_slots != asked.num_member_slots:
        runtime.refuse(layout_refusal(asked=asked.words(), resolved=made.words()))
    return made


def _model(view: Any, layout: Layout) -> ModelFacts | None:
    """What is to be served; None where SGLang has not been told."""
    if _has_no_model(view):
        return None
    steps_on_cpu = layout.steps_together and runtime.device_of(view) == "cpu"
    return model_facts(model_config_of(view), steps_together_on_cpu=steps_on_cpu)


def _reasons(
    view: Any, wanted: Config, layout: Layout, model: ModelFacts | None, of_features: Sequence[str]
) -> list[str]:
    # The linker is ours by now. Without a radix cache it is idle, which the ranks say.
    facts = replace(flags.facts(view, wanted, layout), external_linker_backend=None, disable_radix_cache=False)
    reasons = [*refusals(facts), *mode_refusals(flags.modes(view)), *_tenant_lines(view, wanted), *of_features]
    lines = [] if model is None else [model_refusal(model), _draft_line(view, model), _steps_line(view)]
    if any(lines):
        return [*reasons, *filter(None, lines)]
    return reasons if model is None else [*reasons, *kind_refusals(flags.kinds(view, wanted, layout, model))]


def _tenant_lines(view: Any, wanted: Config) -> list[str]:
    """Why tenants cannot be kept apart. Some models make vectors without ``--is-embedding``."""
    if not wanted.tenant_secret_file:
        return []
    makes_vectors = not (_has_no_model(view) or model_config_of(view).is_generation)
    asked = flags.tenants(view, wanted)
    return tenant_refusals(replace(asked, is_embedding=asked.is_embedding or makes_vectors))


def _draft_line(view: Any, model: ModelFacts) -> str | None:
    """Why the draft cannot run where ranks step together; None where they do not, and where there is none."""
    if not model.steps_together_on_cpu or not _has_draft(view):
        return None
    return draft_vocabulary_refusal(architecture_of(_draft_of(view)))


def _steps_line(view: Any) -> str | None:
    """Why a draft with a layer for each step cannot be shared; None where there is none, or its layers are the
    model's."""
    if not view.enable_multi_layer_eagle or not _has_draft(view) or _draft_of(view).num_nextn_predict_layers:
        return None
    return layers_of_steps_refusal(f"--speculative-draft-model-path {view.speculative_draft_model_path}")


def _has_draft(view: Any) -> bool:
    """Whether a draft is served that has a checkpoint, or a part of one."""
    return view.speculative_algorithm is not None and view.speculative_draft_model_path is not None


def _draft_of(view: Any) -> ModelConfig:
    """What SGLang makes of a draft's configuration: of a checkpoint with a model in it too, the layers behind it."""
    return ModelConfig(
        view.speculative_draft_model_path,
        revision=view.speculative_draft_model_revision,
        trust_remote_code=bool(view.trust_remote_code),
        is_draft_model=True,
    )


def _asked(view: Any) -> str:
    """What made SGLang give up its radix cache, as far as it can be told."""
    if view.enable_deterministic_inference:
        return f"--enable-deterministic-inference with the attention backend {attention_backends_of(view)[0]}"
    if _has_no_model(view):
        return "these flags"
    return f"this model ({architecture_of(model_config_of(view))})"


def _has_no_model(view: Any) -> bool:
    """SGLang resolves nothing then."""
    return str(view.model_path).lower() in ("none", "dummy")
