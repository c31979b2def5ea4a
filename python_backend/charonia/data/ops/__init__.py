"""The interface between model and device, and its implementations.

`base` is the interface. `native` implements it for CPUs, in C++. `composed` implements it for all
other devices with primitive operations: those of `torch_ops`, or the slow and simple ones of
`reference`, which tests compare with. Must not know plans or names of weights.
"""
