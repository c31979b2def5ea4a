"""What the models' processes say to each other through sockets."""
