# SPDX-License-Identifier: Apache-2.0
"""Launch lines that people use, with ``--enable-banyan`` added: which would start and share, what refuses the rest."""
