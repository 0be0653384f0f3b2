"""What a reward is made of: shaping by configuration, and functions of the user's own."""
