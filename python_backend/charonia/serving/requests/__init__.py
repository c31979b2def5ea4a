"""The way of one request through a Triton model, from its tensors to its responses."""
