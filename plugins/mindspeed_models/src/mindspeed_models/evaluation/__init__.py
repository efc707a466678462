"""Evaluation of trained models on local files of seven benchmarks; nothing is downloaded."""
