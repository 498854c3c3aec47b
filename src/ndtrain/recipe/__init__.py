"""The recipe: its keys, how it is read, checked and explained. Imports no heavy library."""
