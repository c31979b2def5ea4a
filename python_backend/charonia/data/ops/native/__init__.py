"""The native implementation for CPUs: one C++ source, how it is built, and what it plugs into.

`kernels.cpp` computes, `build` compiles it for this processor and caches the result, `ops` puts it
behind the seam of `ops.base`, `threads` says which cores it runs on.
"""
