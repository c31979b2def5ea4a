"""What clients write and read: the tables of tensors and parameters, and others' conventions."""
