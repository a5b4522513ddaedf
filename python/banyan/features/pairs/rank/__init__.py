# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode servers: what Banyan adds to SGLang's hand-over of KV. Scheduler processes only."""
