# SPDX-License-Identifier: Apache-2.0
"""Features, each a folder that can be taken away (``banyan.feature``). ``banyan.feature_list`` names them."""
