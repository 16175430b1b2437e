"""`faser fleet`: replicas of one engine behind one entry point; how many there are follows the load."""
