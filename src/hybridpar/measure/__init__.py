"""What is measured beside time and traffic: bytes held, FLOPs, and what the machine can do at best."""
