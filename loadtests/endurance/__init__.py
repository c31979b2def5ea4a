"""The endurance run: stops and loads, one after the other, and what must come of each."""
