"""The run: assembly, loop, optimizer, checkpoints and export."""
