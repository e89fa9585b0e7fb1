"""Running a command on other machines and reading what it answers.

`ssh` builds the command line (the one list of ssh's options), `ask` runs one command line for every
host at the same time and returns answers or failures as values, and `messages` is how lines of ours
are told from what a login prints.
"""
