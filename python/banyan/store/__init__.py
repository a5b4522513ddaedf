# SPDX-License-Identifier: Apache-2.0
"""Where pages rest below DRAM: a store by its URL, behind one interface (``ports.PageStore``).

``location`` says what URLs mean, ``backends`` opens what they name. Files are kept by the native core.
"""
