"""The native implementation for CPUs: its C++ sources, how they are built, and what they plug into.

`kernels.cpp` names the sources and binds them, `build` compiles them for this processor and caches
the result, `ops` puts it behind the seam of `ops.base`, `threads` says which cores it runs on.
"""
