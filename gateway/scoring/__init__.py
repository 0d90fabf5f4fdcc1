"""Rerank and score calls: long lists of documents are spread over all replicas."""
