"""The fault campaign: what it breaks, what runs meanwhile, and what must come of it."""
