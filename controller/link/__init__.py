"""The sidecar's end of the wire, and the orders that other commands send to it."""
