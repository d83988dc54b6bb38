"""Speculative decoding: draft proposers, one file per kind, behind one interface."""
