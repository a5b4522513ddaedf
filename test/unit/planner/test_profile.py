# SPDX-License-Identifier: Apache-2.0
import stat

import pytest

from banyan.pacing import SlackTable
from banyan.planner import BadProfile, ForwardSample, PrefillCost, Profile, profile

PROFILE = Profile(
    format=profile.FORMAT,
    model="m",
    num_layers=30,
    provenance={"date": "2026-11-21"},
    samples=[ForwardSample(((16, 0),), 900.0)],
    held_out=[ForwardSample(((20, 0),), 950.0)],
    held_out_error=0.05,
    cost=PrefillCost(1.0, 2.0, 0.5, 0.0),
    slack=SlackTable((16, 64), (0,), ((30.0,), (90.0,))),
)


def test_profile_when_saved_then_it_is_read_back_and_private(tmp_path):
    path = tmp_path / "profile.json"
    profile.save(PROFILE, path)
    assert profile.load(path) == PROFILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_profile_when_it_was_broken_off_before_then_saved_anew(tmp_path):
    path = tmp_path / "profile.json"
    path.with_name("profile.json.partial").write_text("{")
    profile.save(PROFILE, path)
    assert profile.load(path) == PROFILE


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:100],
        lambda text: text.replace('"num_layers": 30', '"num_layers": "thirty"'),
        lambda text: text.replace('"token_us": 2.0', '"token_us": -2.0'),
        lambda text: text.replace("90.0", "10.0"),
        lambda text: text.replace("banyan-profile-1", "banyan-profile-9"),
        lambda text: text.replace('"model"', '"mode"'),
    ],
    ids=["torn", "type", "negative", "not monotone", "newer", "unknown field"],
)
def test_profile_when_the_file_is_none_then_the_flag_and_the_way_out_are_named(tmp_path, change):
    path = tmp_path / "profile.json"
    profile.save(PROFILE, path)
    text = path.read_text()
    path.write_text(change(text))
    assert path.read_text() != text
    with pytest.raises(BadProfile, match=r"--banyan-profile .*again"):
        profile.load(path)


def test_profile_when_there_is_no_file_then_the_command_is_named(tmp_path):
    with pytest.raises(BadProfile, match="banyan profile"):
        profile.load(tmp_path / "none.json")


def test_mismatch_when_the_model_has_other_layers_then_a_line():
    assert profile.mismatch(PROFILE, num_layers=30) is None
    assert "30 layers, this model has 28" in profile.mismatch(PROFILE, num_layers=28)
