"""Training of the learned policy with stable-baselines3, and its release."""
