"""The same copies on CUDA: kernels, streams and events, pinned memory, and a twin of `PagedKV`."""
