"""The command `gateway`: one module a command, imported when it is called."""
