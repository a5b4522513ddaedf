# SPDX-License-Identifier: Apache-2.0
"""One patch of each feature made unfit in turn: what is off, what is said, and who is refused."""

from dataclasses import replace

import pytest

import banyan.features
from banyan import feature_list as features
from banyan import patches
from banyan.config import Config
from banyan.feature import Asked, Feature
from banyan.layout import Layout
from banyan.refusals.models import ModelFacts

QUEUE = patches.load_queue()
HIDING = Config(policy="lmetric", answer_details=False)
ASKED = Asked(config=Config(policy="lmetric"))
NEEDED_BY = {
    "planner": (replace(ASKED, steps_together=True), "--enable-dp-attention"),
    "windows": (
        replace(ASKED, model=ModelFacts(architecture="Gemma", has_window=True)),
        "Gemma keeps a sliding window",
    ),
    "states": (replace(ASKED, model=ModelFacts(architecture="Qwen", has_states=True)), "Qwen keeps states"),
    "images": (
        replace(ASKED, model=ModelFacts(architecture="Deep", takes_media=True)),
        "Deep takes images, video or sound",
    ),
    "index_keys": (replace(ASKED, model=ModelFacts(architecture="Deep", has_index_keys=True)), "Deep keeps index keys"),
    "drafts": (replace(ASKED, algorithm="EAGLE"), "--speculative-algorithm EAGLE"),
    "adapters": (replace(ASKED, has_adapters=True), "--lora-paths"),
    "pairs": (replace(ASKED, disaggregation_mode="decode"), "--disaggregation-mode decode"),
    "tenant_share": (
        replace(ASKED, config=Config(tenant_share=0.5, tenant_secret_file="secret")),
        "--banyan-tenant-share",
    ),
    "answers": (replace(ASKED, config=HIDING), "--banyan-no-answer-details"),
}
WITH_PATCHES = {patch.feature for patch in QUEUE}
NAMES = [feature.name for feature in features.FEATURES if feature.name in WITH_PATCHES]


def unfit(name):
    """One misfit of a feature."""
    patch = next(patch for patch in QUEUE if patch.feature == name)
    return patches.Misfit(patch, patch.sources[-1], "it has changed")


@pytest.mark.parametrize("name", NAMES)
def test_feature_when_one_of_its_patches_is_unfit_then_it_alone_is_off_and_a_line_names_it_and_the_patch(name):
    (off,) = features.switched_off([unfit(name)])
    assert off.feature.name == name
    assert off.name == (unfit(name).patch.name if name in ("guards", "observe") else name)
    assert off.name in off.line and off.feature.instead in off.line and f"{name}/{unfit(name).patch.name}" in off.line


def test_features_when_several_are_unfit_then_each_has_a_line_and_the_core_is_first():
    off = features.switched_off([unfit(name) for name in reversed(NAMES)] + [unfit("core")])
    assert [one.feature.name for one in off] == NAMES
    assert len(off[0].reasons) == 2


@pytest.mark.parametrize("name", NAMES[1:])
def test_server_when_a_feature_is_off_then_it_is_refused_only_where_it_cannot_do_without(name):
    off = {name: ("patch x: it has changed",)}
    assert features.refusals(off, ASKED) == []
    if name not in NEEDED_BY:
        return
    asked, needed_by = NEEDED_BY[name]
    (line,) = features.refusals(off, asked)
    assert line.startswith(needed_by) and "it has changed" in line and "use --banyan-share off" in line
    assert features.needed(asked) == ["core", name]
    assert features.refusals({}, asked) == []


ALONE = Config(share="off", policy="sglang")


@pytest.mark.parametrize("name", sorted(NEEDED_BY))
def test_server_when_it_shares_nothing_then_nothing_of_sharing_is_needed(name):
    assert features.needed(replace(NEEDED_BY[name][0], config=ALONE)) == ["core"]


def test_server_when_it_shares_nothing_and_is_to_hide_where_tokens_were_cached_then_it_needs_what_hides_it():
    hiding = replace(ASKED, config=replace(ALONE, answer_details=False))
    assert features.needed(hiding) == ["core", "answers"]


def test_core_when_it_is_off_on_one_of_several_nodes_then_the_server_is_refused_for_the_others_would_wait():
    layout = Layout(dp=1, attn_dp=4, attn_cp=1, attn_tp=1)
    over = replace(ASKED, layout=replace(layout, num_nodes=2))
    off = {features.CORE: ("patch x: it has changed",)}
    (line,) = features.refusals(off, over)
    assert line.startswith("--nnodes") and "it has changed" in line and "use --banyan-share off" in line
    assert features.refusals(off, replace(over, layout=layout)) == []
    assert features.refusals(off, replace(over, config=ALONE)) == []


def test_placement_when_it_is_off_then_sglang_chooses_and_nothing_is_looked_up():
    (off,) = features.switched_off([unfit("placement")])
    assert off.feature.is_used(ASKED)
    without = off.feature.without(ASKED.config)
    assert (without.policy, without.looks_up) == ("sglang", False)
    assert not off.feature.is_used(replace(ASKED, config=without))


def test_feature_when_its_folder_has_only_compiled_files_left_then_it_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "left" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(banyan.features, "__path__", [*banyan.features.__path__, str(tmp_path)])
    left = Feature(name="left", instead="nothing", has_folder=True)
    assert not left.is_installed and replace(left, name="nodes").is_installed
