"""Which sample each rank takes when, and the batches made of them."""
