"""Looking at results: runs as a list, one run on the screen, curves of several in a file."""
