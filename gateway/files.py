"""Files that are named in the configuration, which others write: only regular ones, of bounded size.

A named pipe or a device would block the reader or never end, and a reader that hangs sees no later change.
"""

import os
import stat
from pathlib import Path
from typing import Final

MAX_CONFIG_BYTES: Final = 16 << 20  # of the configuration or the keys file, which may have 10,000 keys
MAX_LISTING_BYTES: Final = 1 << 20  # of a list of backends
MAX_PEM_BYTES: Final = 4 << 20  # of certificates; a system's bundle has 0.3 MiB


def version_of(file: Path) -> tuple[int, ...]:
    """A value that changes with the file, or the target of its link. Raises OSError."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_file(file: Path, max_bytes: int) -> bytes:
    """The contents. Raises OSError, also if the file is not a regular one, or larger."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # waits for no writer of a pipe
    with open(descriptor, "rb") as source:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "is not a regular file")
        data = source.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(None, f"is larger than {max_bytes} bytes, the limit")
    return data


def check_pem(file: str) -> str:
    """The path of certificates or a key, for OpenSSL, which reads the file itself and would wait for a named pipe.

    Raises OSError.
    """
    read_file(Path(file), MAX_PEM_BYTES)
    return file
