"""The trained policy: what it asks its network, the network without torch, and its advice on what tokens are worth."""
