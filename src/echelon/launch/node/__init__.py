"""What runs on one node: the torchrun agent, the fork server, the rendezvous and the lifeline."""
