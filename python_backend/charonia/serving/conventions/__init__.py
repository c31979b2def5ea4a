"""The interface of clients: tables of tensors and parameters, and conventions of other servers."""
