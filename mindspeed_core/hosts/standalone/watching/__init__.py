"""What a run tells about itself while it trains, and what it does about what it sees."""
