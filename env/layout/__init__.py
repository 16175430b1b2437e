"""What a learned policy sees, does and earns: names, units, bounds."""
