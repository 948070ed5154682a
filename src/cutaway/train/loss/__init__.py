"""Loss functions: chunked cross-entropy for any head and for a linear head, and the load-balancing loss of experts."""
