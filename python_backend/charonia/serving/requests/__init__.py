"""One request while a model of Triton has it: in, and out again as responses."""
