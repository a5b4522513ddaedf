# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server, and in which order."""
