# SPDX-License-Identifier: Apache-2.0
"""The main process: flags, refusals before anything starts, requests that run again, answers to clients."""
