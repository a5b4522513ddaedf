# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

# With importlib import mode a test's own folder is not searched; `bench_fakes` lies in it.
sys.path.insert(0, str(Path(__file__).parent))
