"""The decoder of the llama family: its configuration, layers and weights.

Must not know pages, plans or devices: `ops` runs the heavy computation.
"""
