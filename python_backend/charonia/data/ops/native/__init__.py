"""The native implementation for CPUs: C++ sources, their compilation, and the interface to `Ops`.

`kernels.cpp` lists and binds the sources. `build` compiles them for this processor and caches the
result. `ops` implements `ops.base` with them. `threads` chooses the cores. `tuning` measures how
products read weights fastest.
"""
