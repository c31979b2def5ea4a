"""The seam below the model: what a device must be able to do, and who does it.

`base` is the seam. `native` implements it for CPUs in C++; `composed` for anything else, out of
primitive operations: those of `torch_ops`, or the slow and obvious ones of `reference`, which
tests compare with. Must not know plans or weights' names.
"""
