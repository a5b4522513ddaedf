# SPDX-License-Identifier: Apache-2.0
"""``banyan trace``: what becomes of one request in running servers, step by step."""
