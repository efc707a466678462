"""Formats of ``--quant-states``; no torch."""

from __future__ import annotations

FP8, BF16 = "fp8", "bf16"
"""e4m3 with a scale for every block of 128; bfloat16. Both rounded stochastically."""
MXFP8, HIF8 = "mxfp8", "hif8"
"""MindSpeed's other two, which are refused."""
