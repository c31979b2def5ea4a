"""From committed tokens to what clients get: text, log-probabilities, one end."""
