"""The layer that talks to Triton: tensors, sessions, BLS. `pb_utils` is always an argument."""
