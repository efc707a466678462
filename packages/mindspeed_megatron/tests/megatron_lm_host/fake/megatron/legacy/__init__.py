"""Modules of older models."""
