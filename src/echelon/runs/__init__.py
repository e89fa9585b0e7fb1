"""A run folder: its paths, its failure record and its heartbeat."""
