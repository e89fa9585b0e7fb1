"""What a user gives: the parts to train, how they are checked, and how they are computed."""
