# SPDX-License-Identifier: Apache-2.0
"""A server that shares, under traffic of all kinds at once, for as long as one likes: does anything grow, end, or say
another token? ``make soak MINUTES=60``; leaves build/soak/report.json and report.html."""
