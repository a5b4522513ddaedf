# SPDX-License-Identifier: Apache-2.0
"""A tiny model with a vision tower, and prompts with pictures: what the modes with images are asked.

Weights of the tower are drawn as wide as the model's, so that what a picture shows decides about the next token.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from benchmark.modes import models
from benchmark.modes.asking import GREEDY, Answer, Ask, answer_of, post

PATCH_PIXELS, MERGED = 14, 2
SIDE = 16
"""Patches of a picture's side; two by two of them become a token."""

NUM_IMAGE_TOKENS = (SIDE // MERGED) ** 2
START, PAD, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
NUM_MORE_TOKENS = NUM_IMAGE_TOKENS + 2
"""Of a prompt with a picture, beside its text: the picture's, and one at each end of it."""

# SGLang asks a model with a vision tower about a picture before it is ready, as a chat.
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    f"{{% else %}}{START}{PAD}{END}{{% endif %}}{{% endfor %}}{{% endif %}}{{% endfor %}}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz "


def ensure(folder: Path = models.FOLDER) -> Path:
    """The folder of the checkpoint; made when it is not there."""
    return models.made(folder / "vision", _write)


def _write(scratch: Path) -> None:
    words = models.tokenizer()
    words.add_special_tokens({"additional_special_tokens": [START, PAD, END, VIDEO]})
    words.chat_template = TEMPLATE
    start, pad, end, video = words.convert_tokens_to_ids([START, PAD, END, VIDEO])
    head_dim = models.COMMON["hidden_size"] // models.COMMON["num_attention_heads"]
    thirds = [head_dim // 8, head_dim * 3 // 16, head_dim * 3 // 16]
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": thirds}
    text = {**models.COMMON, "num_key_value_heads": 2, "vocab_size": models.VOCABULARY, "rope_parameters": rotary}
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "out_hidden_size": models.COMMON["hidden_size"],
        "fullatt_block_indexes": [1],
        "window_size": 4 * PATCH_PIXELS,
        "initializer_range": models.WEIGHT_STD,
    }
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text,
        vision_config=tower,
        image_token_id=pad,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(models.SEED)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(scratch)
    size = {"shortest_edge": (4 * PATCH_PIXELS) ** 2, "longest_edge": (4 * SIDE * PATCH_PIXELS) ** 2}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=words,
        video_processor=Qwen2VLVideoProcessor(size=size),
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(scratch)
    # SGLang's own reader of pictures looks for it beside the processor's.
    processor.image_processor.save_pretrained(scratch)


def picture(seed: int) -> str:
    """A picture of coloured squares, drawn by its number: PNG in base64."""
    drawn = np.random.default_rng(seed)
    squares = drawn.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    pixels = squares.repeat(PATCH_PIXELS, axis=0).repeat(PATCH_PIXELS, axis=1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def body(ids: Sequence[int], seed: int) -> dict[str, Any]:
    """A request for greedy tokens: as many letters as ``ids``, which decide them, with a picture behind the first half.
    A letter is a token."""
    letters = "".join(LETTERS[number % len(LETTERS)] for number in ids)
    half = len(letters) // 2
    text = f"{letters[:half]}{START}{PAD}{END}{letters[half:]}"
    return {"text": text, "image_data": picture(seed), "sampling_params": GREEDY, "return_logprob": True}


def tokens(url: str) -> Ask:
    """Asks ``url`` about a picture: each prompt has one of its own."""

    def ask(ids: Sequence[int], rank: int | None) -> Answer:
        asked = body(ids, seed=ids[0]) | {"routed_dp_rank": rank}
        return answer_of(post(f"{url}/generate", asked))

    return ask
