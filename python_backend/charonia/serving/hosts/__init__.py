"""One module for each of Triton's models: what its process does with requests."""
