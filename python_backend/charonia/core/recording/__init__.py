"""Records of a run: traffic, steps, the scheduler's calls, the cache's events."""
