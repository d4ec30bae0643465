"""`lmtier prove`: a black-box proof that an engine with a cache answers as it does without one."""
