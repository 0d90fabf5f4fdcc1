"""When a request may go to which engine: the queue, fair shares, capacity and leases."""
