"""What leaves its owner, what that costs, and how much may be spent."""
