"""The endpoints of files and batches."""

from dataclasses import replace

from gateway.core.front.routes import Route
from gateway.core.request import Kind

_FILE_BYTES = 1 << 40  # batches.max_file_bytes is checked while the file arrives
_BATCH_BYTES = 65536
_EMPTY_BODY_BYTES = 64  # some clients send {} where no body is needed
_BATCHES = Route("batches", local=True, answered_by="batches")
_FILES = replace(_BATCHES, endpoint="files")

BATCH_ROUTES = {
    (b"POST", b"/v1/files"): replace(_FILES, kind=Kind.UPLOAD, max_body_bytes=_FILE_BYTES),
    (b"GET", b"/v1/files"): _FILES,
    (b"GET", b"/v1/files/{id}/content"): _FILES,
    (b"DELETE", b"/v1/files/{id}"): _FILES,
    (b"GET", b"/v1/files/{id}"): _FILES,
    (b"POST", b"/v1/batches"): replace(_BATCHES, max_body_bytes=_BATCH_BYTES),
    (b"GET", b"/v1/batches"): _BATCHES,
    (b"GET", b"/v1/batches/{id}"): _BATCHES,
    (b"POST", b"/v1/batches/{id}/cancel"): replace(_BATCHES, max_body_bytes=_EMPTY_BODY_BYTES),
}
