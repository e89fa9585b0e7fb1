"""Launchers: where a run happens. Each makes a plan first and then carries it out."""
