"""What a limit on the sequences in flight does to a modelled engine that more want to use than it can hold."""
