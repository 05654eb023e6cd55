"""The CPU engine: stored weights multiplied as they lie in the file, by Numba kernels.

Importing this package loads nothing; `cutaway.engines.make_engine` imports `engine` when it is needed.
"""
