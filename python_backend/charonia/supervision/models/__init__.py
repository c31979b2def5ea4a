"""Whether the models' processes and their server live, and what is done as they come and go."""
