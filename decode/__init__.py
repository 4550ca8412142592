"""The decoder: candidate trees, one-pass verification, drafters, the generation engine and `medusa-decode`."""
