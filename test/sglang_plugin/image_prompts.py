# SPDX-License-Identifier: Apache-2.0
"""Prompts with an image in them, made by SGLang's own classes."""

from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

IMAGE_TOKEN = 7


def image_prompt(content, *, num_tokens, image):
    """``(token ids as the tokenizer has them, what SGLang's processor sends along)``: text with an image at the range
    ``image``, whose content has the 64-bit hash ``content``.
    """
    ids = [IMAGE_TOKEN if number in image else 100 + number for number in range(num_tokens)]
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(image[0], image[-1])])
    item.set_hash(content)
    padded = MultimodalProcessorOutput.build_padded_input_ids(ids, [item])
    return ids, MultimodalProcessorOutput(mm_items=[item], input_ids=ids, padded_input_ids=padded)
