# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints: the same recipe gives the same weights, and another recipe makes them anew."""

import pytest
from safetensors.torch import load_file

from benchmark.modes import models


@pytest.mark.parametrize("shape", [models.LLAMA, models.MOE, models.MLA, models.SINKS], ids=lambda shape: shape.name)
def test_checkpoint_when_it_is_made_twice_then_the_weights_are_equal(tmp_path, shape):
    one, two = (load_file(models.ensure(shape, tmp_path / name) / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


def test_checkpoint_when_the_recipe_has_changed_then_it_is_made_anew(tmp_path, monkeypatch):
    path = models.ensure(models.LLAMA, tmp_path)
    (path / "model.safetensors").unlink()
    assert models.ensure(models.LLAMA, tmp_path) == path and not (path / "model.safetensors").exists()
    monkeypatch.setattr(models, "RECIPE", models.RECIPE + 1)
    assert (models.ensure(models.LLAMA, tmp_path) / "model.safetensors").exists()


def test_tokenizer_when_text_is_not_ascii_then_it_comes_back():
    words = models.tokenizer()
    ids = words.encode("wie schön: 森")
    assert words.decode(ids) == "wie schön: 森" and max(ids) < models.VOCABULARY
