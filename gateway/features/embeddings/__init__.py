"""Embedding calls: many small ones become few full batches, and long lists are spread over all replicas."""
