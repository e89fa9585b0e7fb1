"""Snapshots of a training: format, reading, writing, shards, and the state they hold."""
