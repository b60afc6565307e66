"""What a strategy costs on a machine: time and memory of a step, vectorised over strategies. No torch here."""
