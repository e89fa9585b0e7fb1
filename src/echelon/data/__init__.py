"""Which sample when, and the batches made of them."""
