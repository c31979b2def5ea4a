"""What watches processes and brings them back: beside the server, and in its models' processes."""
