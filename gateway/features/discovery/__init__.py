"""Finds backends: a file that changes, the addresses of a name in DNS, or the pods of a Service in Kubernetes."""
