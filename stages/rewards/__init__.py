"""Components of a reward: shaping by configuration, and functions of the user."""
