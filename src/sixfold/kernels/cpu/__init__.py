"""C kernels, compiled on first use by the machine's own compiler and called through ctypes."""
