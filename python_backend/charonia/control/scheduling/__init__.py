"""Steps from requests: the requests that have a row, the work of each row, and the results."""
