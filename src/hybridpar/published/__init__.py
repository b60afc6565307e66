"""What others measured and published, read from `data/published`. No torch here."""
