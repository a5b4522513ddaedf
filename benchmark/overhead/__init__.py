# SPDX-License-Identifier: Apache-2.0
"""What sharing costs where there is nothing to share and a step takes milliseconds."""
