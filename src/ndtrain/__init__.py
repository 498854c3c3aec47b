"""Fine-tune language models on any mesh of devices: one recipe, four axes, the same result."""

__version__ = "0.1.0"
