"""How a large number of agents is spread over a tree, so that none has too many connections.

Up to `FANOUT` nodes hang on the leader. Above that the leader sends some of its nodes on to others,
which pass on what goes up and down: 64 × 64 nodes make a tree of depth 2. A node with too many
children of its own does the same, so the tree may become deeper. The connections themselves are in
`lifeline_sockets.py`.

Messages of the tree have a key `tree`, which says what they are:

    up     relayed     messages of the nodes below, in order, each with its node
           gone        inside of it: a node is lost, and those `behind` it have no way to the leader
           moved       the last message on this connection: the next ones come over the new parent
           stay        the new parent could not be reached
    down   all, to     a message for every node, and for one
           redirect    connect to that node, and go on there
           introduce   introduce yourself again, since the leader is another one
           leader_lost wait here until there is another leader
           drop        close the connection to that node
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from echelon.launch.node.message_channel import Message

FANOUT = 64
"""So many connections of other nodes an agent keeps."""
RELAY_DELAY_S = 0.02
"""So long a message waits for others that go up with it. Heartbeats wait for the next one."""
_MAX_ITEMS = 256


class RelayQueue:
    """What is to be sent up together."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Message]] = []
        self._lock = threading.Lock()

    def put(self, node: int, message: Message) -> None:
        """Append a message of a node. Of its heartbeats only the newest is kept."""
        with self._lock:
            if is_heartbeat(message):
                self._items = [i for i in self._items if i[0] != node or not is_heartbeat(i[1])]
            self._items.append((node, message))

    def take(self) -> list[Message]:
        """Return all as messages to the parent, and forget it."""
        with self._lock:
            items, self._items = self._items, []
        parts = [items[i : i + _MAX_ITEMS] for i in range(0, len(items), _MAX_ITEMS)]
        return [{"tree": "relayed", "items": part} for part in parts]

    def clear(self) -> None:
        with self._lock:
            self._items = []


def is_heartbeat(message: Message) -> bool:
    return "heartbeats" in message


def choose_moves(
    subtree_sizes: Mapping[int, int], movable: Collection[int], fanout: int
) -> dict[int, int]:
    """Return which children go on to which others, if there are more than `fanout`.

    `subtree_sizes` has all children, each with the number of nodes that are reached through it.
    Those with the fewest nodes behind them go, and of these the ones with the highest numbers,
    since the lowest lead next.
    """
    excess = len(subtree_sizes) - fanout
    if excess <= 0:
        return {}
    moves = dict.fromkeys(sorted(movable, key=lambda n: (subtree_sizes[n], -n))[:excess], -1)
    sizes = {node: size for node, size in subtree_sizes.items() if node not in moves}
    for node in moves:
        moves[node] = parent = min(sizes, key=lambda other: (sizes[other], other))
        sizes[parent] += subtree_sizes[node]
    return moves
