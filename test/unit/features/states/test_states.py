# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.config import Config
from banyan.feature import Asked
from banyan.features import states


@pytest.mark.parametrize(
    ("share", "device", "is_set"), [("peer", "cuda", True), ("off", "cuda", False), ("peer", "cpu", False)]
)
def test_start_when_states_are_shared_on_a_gpu_then_no_layer_reads_one_within_a_graph(
    monkeypatch, share, device, is_set
):
    inherited = {}
    monkeypatch.setattr(states, "inherit", inherited.update)
    states.launched(Asked(config=Config(share=share), device=device))
    assert inherited == ({"SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND": "1"} if is_set else {})
