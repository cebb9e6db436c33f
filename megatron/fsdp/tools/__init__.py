"""Command-line tools: doctor, verify, trace and launch."""
