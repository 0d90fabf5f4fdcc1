"""Functions over the bytes of requests, in C where the extension `kernel` is built, and in Python where it is not.

`kernel.c` and `pure.py` have the same functions, and tests hold them equal. GATEWAY_PURE=1 selects Python.
"""

import os

from gateway._native.pure import LONGEST_BYTES

try:
    if os.environ.get("GATEWAY_PURE") == "1":
        raise ImportError
    from gateway._native.kernel import json_object, prefix_keys, text_turns, whole_request
except ImportError:
    from gateway._native.pure import json_object, prefix_keys, text_turns, whole_request

__all__ = ["LONGEST_BYTES", "json_object", "prefix_keys", "text_turns", "whole_request"]
