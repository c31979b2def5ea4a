"""The decoder of the llama family: its configuration, layers and weights.

Must not know pages, plans or devices: what is heavy goes through `ops`.
"""
