"""From a row's columns to a sample; one file for each family of formats."""
