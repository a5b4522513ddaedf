# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer and chat template behind the two calls that workloads need."""

from __future__ import annotations

from collections.abc import Sequence

from benchmark.workload.conversation import Message


class HuggingFaceTokenizer:
    """Tokenizer of a Hugging Face checkpoint folder. Importing it takes seconds, so nothing else imports
    it."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(path)

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        chat = [{"role": message.role, "content": message.content} for message in messages]
        text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        # The template writes its own markers; added ones would appear twice.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def num_tokens(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
