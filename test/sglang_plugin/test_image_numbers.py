# SPDX-License-Identifier: Apache-2.0
"""SGLang's own items, with the hook on what it hashes: what stands for one in a prompt, and so the page's key, differs
where KV does."""

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from test.sglang_plugin.rank.hooked import hooked

from banyan.sglang_plugin import runtime

TARGET = "sglang.srt.managers.schedule_batch.MultimodalDataItem.set_pad_value"
RECEIVED = "sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor.get_validated_mm_data"
PLAIN = torch.ones(32, 12)
UPRIGHT, ACROSS = torch.tensor([[1, 8, 4]]), torch.tensor([[1, 4, 8]])


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    monkeypatch.setattr(runtime, "is_sharing", lambda: True)


def numbers(feature=PLAIN, modality=Modality.IMAGE, named=None, **beside):
    """What stands for an item of this content."""
    item = MultimodalDataItem(modality=modality, feature=feature, hash=named, model_specific_data=beside)
    hooked(TARGET, MultimodalDataItem.set_pad_value)(item)
    return item.padding_values()


def test_item_when_pixels_are_equal_and_shapes_are_not_then_it_is_another():
    assert numbers(image_grid_thw=UPRIGHT) != numbers(image_grid_thw=ACROSS)
    assert numbers(image_grid_thw=UPRIGHT) == numbers(image_grid_thw=UPRIGHT.clone())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 0.5),
        ([1.0], [0.5]),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([0.5], dtype=torch.bfloat16)),
        (np.array([2, 3]), np.array([[2, 3]])),
        ([[1, 2], [3]], [[1], [2, 3]]),
        ([UPRIGHT, ACROSS], [ACROSS, UPRIGHT]),
    ],
)
def test_item_when_what_it_says_beside_differs_then_it_is_another(one, other):
    videos = [numbers(modality=Modality.VIDEO, second_per_grid_ts=value) for value in (one, one, other)]
    assert videos[0] == videos[1] != videos[2]


def test_item_when_pixels_differ_then_it_is_another():
    assert numbers(image_grid_thw=UPRIGHT) != numbers(PLAIN * 2, image_grid_thw=UPRIGHT)


def test_item_when_it_says_nothing_beside_or_nobody_shares_then_sglangs_own(monkeypatch):
    own = MultimodalDataItem(modality=Modality.IMAGE, feature=PLAIN)
    own.set_pad_value()
    assert numbers() == numbers(kind="text", nothing=None) == own.padding_values()
    monkeypatch.setattr(runtime, "is_sharing", lambda: False)
    assert numbers(image_grid_thw=UPRIGHT) == own.padding_values()


def test_item_when_somebody_has_named_its_hash_then_that_stays():
    assert numbers(named=7, image_grid_thw=UPRIGHT) == numbers(named=7, image_grid_thw=ACROSS)


def test_item_when_it_is_asked_again_then_it_stays_as_it_is():
    item = MultimodalDataItem(modality=Modality.IMAGE, feature=PLAIN, model_specific_data={"image_grid_thw": UPRIGHT})
    make = hooked(TARGET, MultimodalDataItem.set_pad_value)
    make(item)
    before = item.padding_values()
    make(item)
    assert item.padding_values() == before


def test_item_when_an_encoder_elsewhere_has_seen_it_then_its_positions_tell_it_from_one_of_another_shape():
    def received(rows, named=None):
        """What stands for two pictures, the first of so many rows, of eight tokens each."""
        items = [
            MultimodalDataItem(modality=Modality.IMAGE, offsets=[span], precomputed_embeddings=PLAIN[:8], hash=named)
            for span in ((2, 9), (12, 19))
        ]
        positions = torch.arange(20).repeat(3, 1)
        positions[1, 2:10] = torch.arange(8) // (8 // rows)
        sent = MultimodalProcessorOutput(mm_items=items, mrope_positions=positions)
        hooked(RECEIVED, lambda processor, prompt, embeddings: sent)(None, "", {})
        for item in items:
            hooked(TARGET, MultimodalDataItem.set_pad_value)(item)
        return [item.padding_values() for item in items]

    upright, across = received(rows=4), received(rows=2)
    assert upright[0] != across[0] and upright[1] == across[1] and upright == received(rows=4)
    assert received(rows=4, named=7) == received(rows=2, named=7)
