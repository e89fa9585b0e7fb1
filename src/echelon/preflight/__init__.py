"""Checks the nodes that a job will use, before the job does."""
