"""The messages that the models' processes exchange through sockets."""
