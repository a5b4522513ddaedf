# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

# The fakes of the benchmark's tests make the results that reports are made of.
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))
