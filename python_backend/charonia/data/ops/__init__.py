"""The seam below the model: what a device must be able to do, and who does it.

`base` is the seam, `reference` the slow and obvious implementation that tests compare with,
`torch_ops` the one in use, on CPU and CUDA alike. Must not know plans or weights' names.
"""
