"""One file a family: its fields and its rows."""
