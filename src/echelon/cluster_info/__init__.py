"""A Slurm cluster as one user sees it: what is free, when a job would start, a file of defaults.

A login node is asked with one shell script over one ssh connection, and needs nothing but a shell.
"""
