# SPDX-License-Identifier: Apache-2.0
"""``banyan size``: how many tokens of a model fit into DRAM and drives, how long they are kept, and what is written.

The sizes are those of the arena and the store themselves: Full Blocks in frames.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from banyan.config import DEFAULT_PAGE_TOKENS, GIB
from banyan.layout.block import BlockGeometry
from banyan.layout.page import PageLayout

VALUE_BYTES = {"bf16": 2, "fp8": 1}
FULL_ATTENTION = "full_attention"
OTHER_CACHES = ("sliding_window_pattern", "mamba_d_state", "linear_num_key_heads", "compress_ratios")
"""Fields of configurations whose models keep something else than the KV of full attention."""
HOUR_S, DAY_S, YEAR_DAYS = 3600, 86_400, 365.25
TB = 10**12
LEAST, MOST = 1e-6, 1e15
"""Of what is asked for. With these no figure leaves the range of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Figures of one model on one node; None for what was not asked.

    Attributes:
        token_bytes: KV of one token over all layers; a rank's, whatever number of shards it has.
        frame_bytes: what a page takes at rest.
        page_tokens: tokens of a page.
        dram_tokens, ssd_tokens: how many are kept.
        dram_hours, ssd_hours: for how long, if nothing is asked for twice.
        ssd_bytes_per_day: what is written if every page is.
        ssd_years: until the drives have had the writes that they are made for.
    """

    token_bytes: int
    frame_bytes: int
    page_tokens: int
    dram_tokens: int | None = None
    ssd_tokens: int | None = None
    dram_hours: float | None = None
    ssd_hours: float | None = None
    ssd_bytes_per_day: float | None = None
    ssd_years: float | None = None


def block_of(
    config: Mapping[str, Any], *, value_bytes: int, page_tokens: int, draft: Mapping[str, Any] | None = None
) -> BlockGeometry:
    """What a page of this model is at rest, with its draft's rows where it has one, from their ``config.json``.

    Raises:
        ValueError: for a model that keeps something else, or a configuration that does not say enough.
    """
    page = _page_of_config(config, value_bytes=value_bytes, page_tokens=page_tokens)
    if draft is not None:
        # Of a checkpoint that has both, the draft is the layers behind the model's.
        text = _text_of(draft)
        layers = text.get("num_nextn_predict_layers")
        behind = {**text, "text_config": {"num_hidden_layers": layers} if layers else {}}
        try:
            page = page.followed_by([_page_of_config(behind, value_bytes=value_bytes, page_tokens=page_tokens)])
        except ValueError as error:
            raise ValueError(f"--draft: {error}") from error
    return BlockGeometry.of_page(page)


def _page_of_config(config: Mapping[str, Any], *, value_bytes: int, page_tokens: int) -> PageLayout:
    try:
        return _page_of(_text_of(config), value_bytes=value_bytes, page_tokens=page_tokens)
    except KeyError as error:
        raise ValueError(f"config.json does not say {error}") from error
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"config.json says what cannot be worked out: {error}") from error


def _text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model's text, which may stand by themselves."""
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}


def _page_of(text: Mapping[str, Any], *, value_bytes: int, page_tokens: int) -> PageLayout:
    others = {str(kind) for kind in text.get("layer_types") or () if kind != FULL_ATTENTION}
    others |= {name for name in OTHER_CACHES if text.get(name) is not None}
    if others:
        raise ValueError(f"{', '.join(sorted(others))}: this works out pages of full attention in every layer only")
    num_layers = int(text["num_hidden_layers"])
    if text.get("kv_lora_rank"):
        row_bytes = (int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])) * value_bytes
        index_dim = int(text.get("index_head_dim") or 0)
        if index_dim and value_bytes == VALUE_BYTES["fp8"]:
            raise ValueError("--kv fp8: with index keys SGLang lays such rows out in another way: only bf16 is known")
        return PageLayout.of_latents(
            num_layers=num_layers, page_tokens=page_tokens, row_bytes=row_bytes, index_dim=index_dim
        )
    num_heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // num_heads)
    return PageLayout.of_heads(
        num_layers=num_layers,
        page_tokens=page_tokens,
        num_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        value_dim=head_dim,
        element_bytes=value_bytes,
    )


def capacity(
    block: BlockGeometry,
    *,
    page_tokens: int,
    dram_bytes: int | None,
    ssd_bytes: int | None,
    rate: float | None,
    endurance_bytes: float | None,
) -> Capacity:
    """``rate``: new tokens a second that are kept; ``endurance_bytes``: writes that the drives are made for."""

    def tokens(num_bytes: int | None) -> int | None:
        return None if num_bytes is None else block.num_frames(num_bytes) * page_tokens

    def hours(num_tokens: int | None) -> float | None:
        return num_tokens / rate / HOUR_S if num_tokens is not None and rate else None

    dram_tokens, ssd_tokens = tokens(dram_bytes), tokens(ssd_bytes)
    daily = rate * DAY_S * block.frame_bytes / page_tokens if rate and ssd_bytes is not None else None
    return Capacity(
        token_bytes=block.block_bytes // page_tokens,
        frame_bytes=block.frame_bytes,
        page_tokens=page_tokens,
        dram_tokens=dram_tokens,
        ssd_tokens=ssd_tokens,
        dram_hours=hours(dram_tokens),
        ssd_hours=hours(ssd_tokens),
        ssd_bytes_per_day=daily,
        ssd_years=endurance_bytes / daily / YEAR_DAYS if endurance_bytes and daily else None,
    )


def sentences(found: Capacity) -> list[str]:
    """The figures for people."""
    lines = [
        f"one token: {found.token_bytes} bytes of KV; a page of {found.page_tokens}: {found.frame_bytes} bytes at rest"
    ]
    for where, num_tokens, num_hours in (
        ("DRAM", found.dram_tokens, found.dram_hours),
        ("drives", found.ssd_tokens, found.ssd_hours),
    ):
        if num_tokens is not None:
            kept = "" if num_hours is None else f", {num_hours:.1f} hours of new tokens"
            lines.append(f"{where}: {num_tokens} tokens{kept}")
    if found.ssd_bytes_per_day is not None:
        daily = found.ssd_bytes_per_day / GIB
        lines.append(
            f"writes: {daily:.0f} GiB a day at most, as if every page were written; --banyan-store-admit second "
            f"(the default) writes those that are asked for again, --banyan-store-write-gb-per-day sets a limit"
        )
    if found.ssd_years is not None:
        lines.append(f"endurance: {found.ssd_years:.1f} years of that")
    return lines


def add_parser(commands: Any) -> None:
    """Add ``banyan size``."""
    parser = commands.add_parser("size", help="how many tokens of a model DRAM and drives keep, how long, at what wear")
    parser.add_argument("model", type=Path, metavar="MODEL", help="its folder, or its config.json")
    parser.add_argument("--draft", type=Path, metavar="MODEL", help="a draft model that runs beside it; the same")
    parser.add_argument("--dram", type=float, metavar="GIB", help="the host arena (--banyan-host-gb)")
    parser.add_argument("--ssd", type=float, metavar="GIB", help="the store (--banyan-store-gb)")
    parser.add_argument("--rate", type=float, metavar="TOKENS", help="new tokens a second, prompts and answers")
    parser.add_argument("--endurance", type=float, metavar="TB", help="writes that the drives are made for (TBW)")
    parser.add_argument(
        "--page-size", type=int, default=DEFAULT_PAGE_TOKENS, metavar="TOKENS", help="default %(default)s"
    )
    parser.add_argument("--kv", choices=tuple(VALUE_BYTES), default="bf16", help="type of the KV; default %(default)s")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run)


def _config_of(model: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: which names the file.
    """
    # Path.is_dir raises below a folder that its caller may not enter.
    path = model / "config.json" if os.path.isdir(model) else model
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file: name the model's folder on this machine, or its config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: this is no model's config.json")
    return config


def run(args: argparse.Namespace) -> int:
    try:
        for name in ("dram", "ssd", "rate", "endurance", "page_size"):
            value = getattr(args, name)
            if value is not None and not LEAST <= value <= MOST:
                raise ValueError(f"--{name.replace('_', '-')} {value}: from {LEAST:g} to {MOST:g}")
        config = _config_of(args.model)
        draft = None if args.draft is None else _config_of(args.draft)
        block = block_of(config, value_bytes=VALUE_BYTES[args.kv], page_tokens=args.page_size, draft=draft)
    except ValueError as error:
        print(f"banyan size: {error}", file=sys.stderr)
        return 2
    found = capacity(
        block,
        page_tokens=args.page_size,
        dram_bytes=None if args.dram is None else int(args.dram * GIB),
        ssd_bytes=None if args.ssd is None else int(args.ssd * GIB),
        rate=args.rate,
        endurance_bytes=None if args.endurance is None else args.endurance * TB,
    )
    print(json.dumps(asdict(found), indent=2) if args.json else "\n".join(sentences(found)))
    return 0
