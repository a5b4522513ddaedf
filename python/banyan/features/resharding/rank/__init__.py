# SPDX-License-Identifier: Apache-2.0
"""What a rank's store has of other sizes."""
