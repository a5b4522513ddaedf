# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.layout import BlockGeometry, PageLayout, cacheable_tokens
from banyan.layout.page import Part

GQA = {"num_layers": 2, "page_tokens": 16, "num_heads": 4, "head_dim": 32, "value_dim": 16, "element_bytes": 2}


def test_page_when_it_is_of_heads_then_keys_and_values_of_each_layer():
    page = PageLayout.of_heads(**GQA)
    assert page.identity() == ((("keys", 4096), ("values", 2048)),) * 2
    assert page.page_bytes == 2 * 6144 and page.bytes_by_name == {"keys": 8192, "values": 4096}


def test_page_when_an_indexer_has_keys_then_a_row_of_64_keys_and_scales_lies_beside_the_latents():
    page = PageLayout.of_latents(num_layers=3, page_tokens=64, row_bytes=656, index_dim=128)
    assert page.layers[0] == (Part("latents", 64 * 656), Part("index keys", 8448))
    assert BlockGeometry.of_page(page).layer_bytes == [64 * 656 + 8448] * 3


def test_page_when_pools_differ_in_what_an_extent_holds_only_then_they_are_not_the_same():
    one, other = (PageLayout.of_layers(1, Part(name, 64)) for name in ("latents", "index keys"))
    assert one.sizes == other.sizes and one.identity() != other.identity()


@pytest.mark.parametrize("sizes", [(), (4, 0), (-1,)])
def test_page_when_a_size_is_not_positive_then_it_is_refused(sizes):
    with pytest.raises(ValueError, match="no page of"):
        PageLayout.of_layers(1, *(Part("keys", size) for size in sizes))
    with pytest.raises(ValueError, match="no page of"):
        PageLayout.of_layers(0, Part("keys", 4))


def test_page_when_drafts_follow_it_then_their_layers_lie_behind_and_are_told_from_its_own():
    page = PageLayout.of_heads(**GQA)
    drafts = [
        PageLayout.of_layers(1, Part("keys", 64), Part("values", 32)),
        PageLayout.of_layers(1, Part("latents", 8)),
    ]
    both = page.followed_by(drafts)
    assert both.layers[:2] == page.layers and both.sizes[2:] == ((64, 32), (8,))
    assert both.bytes_by_name == {**page.bytes_by_name, "draft keys": 64, "draft values": 32, "draft latents": 8}
    assert BlockGeometry.of_page(both).layer_bytes == [6144, 6144, 96, 8]
    # A draft of the model's own sizes is no further layers of the model.
    assert page.followed_by([page]).identity() != PageLayout.of_heads(**{**GQA, "num_layers": 4}).identity()
    assert page.followed_by([]) == page


def test_states_when_a_model_has_several_convolutions_or_no_recurrence_then_each_part_has_its_name():
    plain = PageLayout.of_states(num_layers=2, recurrent_bytes=64, convolution_bytes=[8])
    assert plain.bytes_by_name == {"recurrent states": 128, "convolution inputs": 16}
    several = PageLayout.of_states(num_layers=1, recurrent_bytes=0, convolution_bytes=[8, 4])
    assert several.bytes_by_name == {"convolution inputs 0": 8, "convolution inputs 1": 4}


@pytest.mark.parametrize(
    ("num_tokens", "page_tokens", "expected"),
    [(0, 16, 0), (1, 16, 0), (16, 16, 0), (17, 16, 16), (32, 16, 16), (33, 1, 32)],
)
def test_cacheable_tokens_when_a_prompt_ends_at_a_page_or_not_then_its_last_token_is_left_to_compute(
    num_tokens, page_tokens, expected
):
    assert cacheable_tokens(num_tokens, page_tokens) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (17, 0), (18, 16), (33, 16), (34, 32)])
def test_cacheable_tokens_when_keys_look_ahead_then_a_page_takes_the_token_behind_it(num_tokens, expected):
    assert cacheable_tokens(num_tokens, 16, 1) == expected
