"""One tritonserver: its installation, repository, processes, log and page of metrics."""
