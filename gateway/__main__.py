"""`python -m gateway` is the command `gateway`."""

from gateway.cli.main import main

main()
