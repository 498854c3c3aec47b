"""What users and scripts see of a run: events, console, metrics, pictures."""
