"""One module for each Triton model: how its process handles requests."""
