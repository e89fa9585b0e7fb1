"""`python -m echelon` is the command `echelon` of that interpreter, whatever the PATH is."""

from echelon.cli import main

main()
