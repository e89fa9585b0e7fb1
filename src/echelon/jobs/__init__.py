"""What became of runs: how they stand, what they said, how to end them; whatever launched them."""
