"""From a name to a model with weights, adapters and a loss."""
