# SPDX-License-Identifier: Apache-2.0
import sys

from banyan.cli import main

sys.exit(main())
