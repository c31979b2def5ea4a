"""The metrics on their way to Triton's own page."""
