"""The training of one run: loop, replicas, precision, snapshots."""
