"""Functions over the bytes of requests and log lines, in C where `kernel` is built, in Python where it is not.

`kernel.c` and `pure.py` have the same functions, and tests hold them equal. GATEWAY_PURE=1 selects Python. `IN_C`: the
extension runs; `event_chunks` in Python would cost more than the parsing that it saves.
"""

import os

from gateway._native.pure import LONGEST_BYTES
from gateway._native.pure import json_line as json_line_in_python

try:
    if os.environ.get("GATEWAY_PURE") == "1":
        raise ModuleNotFoundError
    from gateway._native.kernel import event_chunks, json_line, json_object, prefix_keys, text_turns, whole_request

    IN_C = True
except ModuleNotFoundError:
    IN_C = False
    from gateway._native.pure import event_chunks, json_line, json_object, prefix_keys, text_turns, whole_request

__all__ = [
    "IN_C",
    "LONGEST_BYTES",
    "event_chunks",
    "json_line",
    "json_line_in_python",
    "json_object",
    "prefix_keys",
    "text_turns",
    "whole_request",
]
