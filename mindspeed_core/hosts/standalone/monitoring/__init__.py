"""What a run reports: metrics, throughput, timings, stragglers, charts, the summary."""
