"""What requests for files and batches fail with, beside the errors of all requests."""

from gateway.core.errors import GatewayError


class FileNotFound(GatewayError, status=404, code="file_not_found"):
    """No file of this API key has this id."""


class BatchNotFound(GatewayError, status=404, code="batch_not_found"):
    """No batch of this API key has this id."""


class BatchConflict(GatewayError, status=409, code="batch_conflict"):
    """The state of the batch does not allow this."""


class StorageFull(GatewayError, status=503, code="storage_full", outcome="storage_full"):
    """The disk of files and batches is full."""


class StorageUnavailable(GatewayError, status=503, code="storage_unavailable", outcome="storage_unavailable"):
    """The database or the bucket of files and batches cannot be reached."""
