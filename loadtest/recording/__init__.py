"""`loadtest record`: a trace for `loadtest replay` out of the gateway's access log."""
