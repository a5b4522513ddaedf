# SPDX-License-Identifier: Apache-2.0
"""The pool of states, in a rank."""
