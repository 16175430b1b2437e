"""What steps of one engine cost: verification by rows, drafting by rounds and rows, splits."""
