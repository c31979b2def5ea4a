"""Triton glue: tensors, sessions, BLS, metrics. `pb_utils` is an argument, never an import."""
