# SPDX-License-Identifier: Apache-2.0
"""The short part of `make modes`: modes that the other tests of the real engine do not run."""

import pytest

from benchmark.modes.__main__ import wrong
from benchmark.modes.rows import MODES
from benchmark.modes.run import run

pytestmark = pytest.mark.e2e
SHORT = (
    "latent attention (MLA)",
    "data-parallel attention, new spelling",
    "LoRA in the store, after a restart",
    "speculation from n-grams",
)


@pytest.mark.parametrize("name", SHORT)
def test_mode_when_it_is_served_then_outputs_are_those_of_a_server_that_shares_nothing(name, alone, tmp_path):
    (mode,) = (mode for mode in MODES if mode.name == name)
    found = run(mode, tmp_path)
    assert wrong(mode, found) is None, found
