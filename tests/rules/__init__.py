"""The rules of the code, checked by `make check`."""
