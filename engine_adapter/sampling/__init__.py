"""Draws by seed, the request's own or one that it is given: the same token at the same place, whatever was drafted."""
