"""What Numba compiles: the kernels' own code. Imported only where a kernel has to be compiled anew."""
