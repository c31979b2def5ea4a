"""The metrics, and the pages that show them."""
