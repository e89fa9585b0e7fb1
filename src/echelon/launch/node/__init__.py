"""One node of a run: its agent, the rendezvous with the other nodes, and the workers it forks."""
