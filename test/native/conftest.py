# SPDX-License-Identifier: Apache-2.0
"""The workers run as scripts, so their modules are found by plain names here too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
