"""State that the packages of the control plane share: a request, a step, limits and counts."""
