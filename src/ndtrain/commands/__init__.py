"""The commands: options in, one call into the layer that does the work. No logic of its own."""
