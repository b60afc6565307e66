"""The planner: every legal strategy of a space, its cost, the best one, and why it is the best. No torch here."""
