"""Attention over the paged cache: one interface, one file per backend."""
