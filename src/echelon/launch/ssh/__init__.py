"""launch=ssh: plain hosts, one agent on each, which live as long as the launcher does."""
