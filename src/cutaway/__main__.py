"""`python -m cutaway` is the command `cutaway`."""

from cutaway.cli import main

main()
