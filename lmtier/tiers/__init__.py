"""The interface of a storage tier, and the threads that run one."""
