"""C kernels, compiled on first use by the machine's C compiler and called through ctypes."""
