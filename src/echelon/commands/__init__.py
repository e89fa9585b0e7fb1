"""One function for every verb: what can be typed, and the room that does it."""
