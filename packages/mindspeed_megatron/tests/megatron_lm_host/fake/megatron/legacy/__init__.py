"""What older models need."""
