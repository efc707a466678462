"""Monitoring: metrics, throughput, timings, stragglers, charts, the summary."""
