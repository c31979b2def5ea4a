"""One tritonserver: installation, repository, processes, log and metrics page."""
