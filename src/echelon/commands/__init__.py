"""What can be typed: one function per command, in files named for the group they belong to.

A function takes the words after its name, parses them, and calls the package that does the work. It
imports that package only then, so that `--help` answers at once.
"""
