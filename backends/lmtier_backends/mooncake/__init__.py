"""Objects in a Mooncake Store: memory of many hosts, reached over TCP or RDMA."""
