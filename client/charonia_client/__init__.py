"""A typed client for charonia."""
