"""Compiled kernels: the only place of the core that imports numba."""
