"""What people see in the terminal: a file for each kind of report, drawn with rich."""
