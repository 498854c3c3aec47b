"""Chat templates of model families, one in each file."""
