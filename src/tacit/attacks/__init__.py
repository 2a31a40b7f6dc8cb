"""What an attacker would learn: attacks on what travels, on what is released, and how well they do."""
