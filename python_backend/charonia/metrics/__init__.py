"""What is measured, and the pages that show it."""
