"""What a run will be, computed before any device is touched. Imports no heavy library."""
