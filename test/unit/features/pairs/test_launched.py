# SPDX-License-Identifier: Apache-2.0
"""What a start sets of SGLang's arguments."""

from types import SimpleNamespace

import pytest

from banyan.config import Config
from banyan.feature import Asked
from banyan.features.pairs.launched import launched


@pytest.mark.parametrize(
    ("asked", "policy", "num_ranks", "left"),
    [
        ("auto", "lmetric", 2, "round_robin"),
        ("total_tokens", "lmetric", 2, "total_tokens"),
        ("auto", "sglang", 2, "auto"),
        ("auto", "lmetric", 1, "auto"),
    ],
)
def test_prefill_server_when_its_ranks_are_chosen_by_a_policy_then_no_room_chooses_them_and_a_users_method_stays(
    asked, policy, num_ranks, left, monkeypatch
):
    monkeypatch.setattr("banyan.config.inherit", lambda variables: None)
    args, layout = SimpleNamespace(load_balance_method=asked, tp_size=1), SimpleNamespace(num_ranks=num_ranks)
    config = Config(share="peer", policy=policy)
    launched(Asked(config=config, disaggregation_mode="prefill", layout=layout, args=args))
    assert args.load_balance_method == left
