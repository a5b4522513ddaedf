# SPDX-License-Identifier: Apache-2.0
import hashlib
import json
from dataclasses import asdict, fields, replace

import pytest

from banyan.layout import Namespace
from banyan.layout.namespace import FORMAT_VERSION

ONE = Namespace(
    model="m",
    revision="r",
    weight_version="v",
    weights_sha256="w",
    weights_epoch=0,
    server="",
    engine="e 1",
    model_config_sha256="c",
    kv_dtype="torch.bfloat16",
    page_tokens=16,
    first_layer=0,
    num_layers=30,
    page=((("keys", 6144), ("values", 6144)),),
    pool_layout="MHA/nhd",
    attn_tp_size=1,
    attn_tp_rank=0,
    attn_cp_size=1,
    attn_cp_rank=0,
)


def test_digest_when_all_fields_are_equal_then_equal():
    assert ONE.digest() == replace(ONE).digest()
    assert len(ONE.digest()) == 32


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_digest_when_one_field_differs_then_different(field):
    value = getattr(ONE, field)
    if isinstance(value, str):
        other = value + "x"
    elif isinstance(value, int):
        other = value + 1
    elif field == "draft":
        other = ("EAGLE", "a-draft")
    else:
        other = ((("keys", 6144), ("index keys", 6144)),)
    assert replace(ONE, **{field: other}).digest() != ONE.digest()


def test_digest_when_there_is_neither_draft_nor_window_then_it_is_that_of_a_release_that_knew_none():
    fields_then = {name: value for name, value in asdict(ONE).items() if name not in ("draft", "window")}
    text = json.dumps({"format": FORMAT_VERSION, **fields_then}, sort_keys=True, separators=(",", ":"))
    assert ONE.digest() == hashlib.sha256(b"banyan-namespace\0" + text.encode()).digest()


def test_digest_when_pages_are_of_other_layers_then_it_differs():
    kinds = (("full", "40 tokens", "wf"), ("window", "40 tokens", "wf"), ("window", "48 tokens", "wf"))
    assert len({ONE.digest(), *(replace(ONE, window=kind).digest() for kind in kinds)}) == 4
