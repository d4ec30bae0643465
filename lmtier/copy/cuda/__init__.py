"""The copies on CUDA: kernels, streams and events, page-locked memory, and the counterpart of `PagedKV`."""
