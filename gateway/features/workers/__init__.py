"""Several processes of one gateway on one machine: a parent starts workers, and serves the store that they share."""

from typing import Final

WORKER: Final = "GATEWAY_WORKER"  # the environment variable with the place of a worker (`place.py`)
